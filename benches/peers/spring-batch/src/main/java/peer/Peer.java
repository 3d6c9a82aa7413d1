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
import org.springframework.kafka.core.KafkaTemplate;
import org.springframework.kafka.listener.CommonErrorHandler;
import org.springframework.kafka.listener.ConsumerAwareRebalanceListener;
import org.springframework.kafka.listener.DeadLetterPublishingRecoverer;
import org.springframework.kafka.listener.DefaultErrorHandler;
import org.springframework.util.backoff.FixedBackOff;
import tools.jackson.core.JacksonException;

@SpringBootApplication
public class Peer {

    public static void main(String[] arguments) {
        SpringApplication.run(Peer.class, arguments);
    }

    /** What is no event goes to the dead letters at once; a database that is away is waited for. */
    @Bean
    CommonErrorHandler faults(KafkaTemplate<?, ?> template) {
        FixedBackOff forEver = new FixedBackOff(1_000, FixedBackOff.UNLIMITED_ATTEMPTS);
        DefaultErrorHandler handler = new DefaultErrorHandler(new DeadLetterPublishingRecoverer(template), forEver);
        handler.addNotRetryableExceptions(JacksonException.class, IllegalArgumentException.class);
        return handler;
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
