package peer;

import java.util.Collection;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.kafka.clients.consumer.Consumer;
import org.apache.kafka.common.TopicPartition;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.context.annotation.Bean;
import org.springframework.kafka.listener.ConsumerAwareRebalanceListener;

@SpringBootApplication
public class Peer {

    public static void main(String[] arguments) {
        SpringApplication.run(Peer.class, arguments);
    }

    /** Says once that every consumer has partitions. */
    @Bean
    ConsumerAwareRebalanceListener ready(@Value("${spring.kafka.listener.concurrency}") int consumers) {
        Set<Consumer<?, ?>> served = ConcurrentHashMap.newKeySet();
        return new ConsumerAwareRebalanceListener() {
            @Override
            public void onPartitionsAssigned(Consumer<?, ?> consumer, Collection<TopicPartition> partitions) {
                if (!partitions.isEmpty() && served.add(consumer) && served.size() == consumers) {
                    System.out.println("ready");
                }
            }
        };
    }
}
