-- The engine's payments, and claims in one plain table with no further index: nothing is forgotten, and nothing cheaper can be asked of
-- the database.
CREATE TABLE processed_event (
    event_id       uuid        NOT NULL,
    consumer_group text        NOT NULL,
    processed_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (event_id, consumer_group)
);

CREATE TABLE payment (
    event_id    uuid        PRIMARY KEY,
    order_id    bigint      NOT NULL CHECK (order_id > 0),
    customer_id bigint      NOT NULL CHECK (customer_id > 0),
    amount      numeric     NOT NULL CHECK (amount > 0),
    currency    text        NOT NULL CHECK (length(currency) = 3),
    status      text        NOT NULL CHECK (status IN ('charged', 'declined')),
    created_at  timestamptz NOT NULL DEFAULT now()
);
