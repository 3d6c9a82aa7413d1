-- The messages that are out.
CREATE TABLE notification (
    event_id    uuid        PRIMARY KEY,
    customer_id bigint      NOT NULL,
    sent_at     timestamptz NOT NULL DEFAULT now()
);
