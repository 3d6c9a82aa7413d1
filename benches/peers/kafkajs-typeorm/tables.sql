-- As the reference has them: the claim's key is the event alone, and claims are found by time for the job that deletes old ones.
CREATE TABLE processed_event (
    event_id       uuid        PRIMARY KEY,
    consumer_group text        NOT NULL,
    processed_at   timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ix_processed_event_processed_at ON processed_event (processed_at);

CREATE TABLE payment (
    event_id    uuid        PRIMARY KEY,
    order_id    bigint      NOT NULL CHECK (order_id > 0),
    customer_id bigint      NOT NULL CHECK (customer_id > 0),
    amount      numeric     NOT NULL CHECK (amount > 0),
    currency    text        NOT NULL CHECK (length(currency) = 3),
    status      text        NOT NULL CHECK (status IN ('charged', 'declined')),
    created_at  timestamptz NOT NULL DEFAULT now()
);
