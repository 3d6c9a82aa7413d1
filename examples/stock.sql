-- What is there of each article, and every reservation with what became of it.
CREATE TABLE stock (
    sku       text   PRIMARY KEY,
    available bigint NOT NULL CHECK (available >= 0)
);

CREATE TABLE stock_reservation (
    event_id uuid    PRIMARY KEY,
    sku      text    NOT NULL,
    quantity bigint  NOT NULL,
    granted  boolean NOT NULL
);
