package peer;

import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.UUID;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.jdbc.core.JdbcTemplate;
import org.springframework.kafka.annotation.KafkaListener;
import org.springframework.kafka.listener.BatchListenerFailedException;
import org.springframework.stereotype.Component;
import org.springframework.transaction.support.TransactionTemplate;
import tools.jackson.core.JacksonException;
import tools.jackson.databind.ObjectReader;
import tools.jackson.databind.json.JsonMapper;

/** One transaction per poll: all claims in one statement, the payments of what was claimed in another. */
@Component
class Billing {

    private static final String CLAIM = """
            INSERT INTO processed_event (event_id, consumer_group)
            SELECT event_id, ? FROM unnest(?) AS new (event_id)
            ON CONFLICT DO NOTHING
            RETURNING event_id""";

    private static final String PAY = """
            INSERT INTO payment (event_id, order_id, customer_id, amount, currency, status)
            SELECT event_id, order_id, customer_id, amount, currency, 'charged'
            FROM unnest(?, ?, ?, ?::numeric[], ?) AS new (event_id, order_id, customer_id, amount, currency)""";

    private final JdbcTemplate jdbc;
    private final TransactionTemplate transaction;
    private final ObjectReader reader;
    private final String group;

    Billing(JdbcTemplate jdbc, TransactionTemplate transaction, JsonMapper mapper,
            @Value("${spring.kafka.consumer.group-id}") String group) {
        this.jdbc = jdbc;
        this.transaction = transaction;
        this.reader = mapper.readerFor(OrderConfirmed.class);
        this.group = group;
    }

    /** Spring commits the offsets of the whole poll once this has returned. */
    @KafkaListener(topics = "${PEER_TOPIC}")
    void onPoll(List<ConsumerRecord<byte[], byte[]>> records) {
        // Each id once, in order, so that no two transactions wait for each other in a circle.
        Map<UUID, OrderConfirmed> events = new TreeMap<>();
        BatchListenerFailedException fault = null;
        for (int index = 0; fault == null && index < records.size(); index++) {
            try {
                OrderConfirmed event = reader.readValue(records.get(index).value());
                events.putIfAbsent(event.eventId(), event);
            } catch (JacksonException | IllegalArgumentException noEvent) {
                fault = new BatchListenerFailedException("no event", noEvent, index);
            }
        }
        if (!events.isEmpty()) {
            transaction.executeWithoutResult(status -> pay(claim(List.copyOf(events.values()))));
        }
        if (fault != null) {
            throw fault; // what stands before it counts as done, and is
        }
    }

    /** Those that are new. */
    private List<OrderConfirmed> claim(List<OrderConfirmed> events) {
        UuidArray ids = new UuidArray(events.stream().map(OrderConfirmed::eventId).toList());
        List<UUID> claimed = jdbc.query(CLAIM, (row, number) -> row.getObject(1, UUID.class), group, ids);
        if (claimed.size() == events.size()) {
            return events;
        }
        Set<UUID> fresh = new HashSet<>(claimed);
        return events.stream().filter(event -> fresh.contains(event.eventId())).toList();
    }

    private void pay(List<OrderConfirmed> events) {
        if (events.isEmpty()) {
            return;
        }
        jdbc.update(PAY,
                new UuidArray(events.stream().map(OrderConfirmed::eventId).toList()),
                events.stream().mapToLong(OrderConfirmed::orderId).toArray(),
                events.stream().mapToLong(OrderConfirmed::customerId).toArray(),
                events.stream().map(event -> event.totalAmount().toPlainString()).toArray(String[]::new),
                events.stream().map(OrderConfirmed::currency).toArray(String[]::new));
    }
}
