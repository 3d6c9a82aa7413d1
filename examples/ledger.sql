-- One entry for each confirmed order, and what each customer owes in each currency.
CREATE TABLE ledger_entry (
    event_id    uuid   PRIMARY KEY,
    customer_id bigint NOT NULL,
    currency    text   NOT NULL,
    minor_units bigint NOT NULL
);

CREATE TABLE ledger_balance (
    customer_id bigint NOT NULL,
    currency    text   NOT NULL,
    minor_units bigint NOT NULL,
    PRIMARY KEY (customer_id, currency)
);
