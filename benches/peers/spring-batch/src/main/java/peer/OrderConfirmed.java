package peer;

import java.math.BigDecimal;
import java.util.UUID;

/** What billing needs of the event. */
record OrderConfirmed(UUID eventId, String eventType, long orderId, long customerId, BigDecimal totalAmount, String currency) {

    OrderConfirmed {
        if (eventId == null || !"order.confirmed.v1".equals(eventType) || orderId <= 0 || customerId <= 0
                || totalAmount == null || totalAmount.signum() <= 0 || currency == null || currency.length() != 3) {
            throw new IllegalArgumentException("not an order.confirmed.v1 that can be charged");
        }
    }
}
