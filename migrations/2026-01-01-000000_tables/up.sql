-- No table refers to another by a foreign key: the check would lock the partition's row for share, and an attempt, which is written
-- on a connection of its own while the batch holds that row, would wait for the batch that waits for it.

-- One claim per event and group. A UUID v7 begins with its millisecond, so a day is a range of ids: days are dropped whole, and the
-- key needs no time in it (with one, the same id would be accepted twice). There is never a DEFAULT partition: it would swallow ids
-- of days that are missing or forgotten, and a day could no longer be made beside it.
-- A plain table of another service (event_id, consumer_group, processed_at) is used as it is: `onceward check` says whether it can be.
CREATE TABLE IF NOT EXISTS processed_event (
    event_id       uuid        NOT NULL,
    consumer_group text        NOT NULL,
    processed_at   timestamptz NOT NULL DEFAULT now(),
    event_digest   bigint,  -- of the canonical event; its low byte is the form's version
    source_id      integer, -- consumed_partition.id
    source_offset  bigint,  -- explains a duplicate, decides nothing
    PRIMARY KEY (event_id, consumer_group)
) PARTITION BY RANGE (event_id);

-- One row per partition of a topic that a group consumes: its owner's epoch is the fence, next_offset the frontier.
CREATE TABLE consumed_partition (
    id                 integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer_group     text        NOT NULL,
    topic              text        NOT NULL,
    partition          integer     NOT NULL CHECK (partition >= 0),
    owner              text        NOT NULL,
    epoch              bigint      NOT NULL CHECK (epoch > 0),
    next_offset        bigint      CHECK (next_offset >= 0),
    last_record_digest bigint,      -- of the record at next_offset - 1
    doubt_offset       bigint,      -- new events below it may have been charged before the database went back
    doubt_before       timestamptz, -- and so may events with an older id
    system_identifier  bigint,      -- of the server that was written to first; another one is another database
    timeline           integer,     -- another one is a promoted standby
    safe_time          timestamptz, -- no unsettled event of the partition is older; NULL: not known yet
    remember_ms        bigint,      -- how long the group needs ids remembered; NULL: not known yet, or for ever
    remember_why       text,        -- what asks for that
    skips              int8multirange, -- offsets that an operator wants passed over
    paused             text,        -- why an operator wants nothing of it consumed; NULL: it goes on
    paused_by          text,
    updated_at         timestamptz NOT NULL DEFAULT now(),
    UNIQUE (consumer_group, topic, partition)
) WITH (fillfactor = 50); -- updated at each batch: leave room on the page, so that no index is touched

CREATE TABLE payment (
    event_id           uuid        PRIMARY KEY,
    order_id           bigint      NOT NULL CHECK (order_id > 0),
    customer_id        bigint      NOT NULL CHECK (customer_id > 0),
    amount             numeric     NOT NULL CHECK (amount > 0),
    currency           text        NOT NULL CHECK (length(currency) = 3),
    status             text        NOT NULL CHECK (status IN ('charged', 'declined')),
    provider_charge_id text,
    attempts           integer     NOT NULL CHECK (attempts >= 0),
    created_at         timestamptz NOT NULL DEFAULT now()
);

-- Attempts in flight: one row per batch, because a row per event would cost nearly half of the throughput.
CREATE TABLE attempt_batch (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source_id  integer     NOT NULL,
    epoch      bigint      NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    event_ids  uuid[]      NOT NULL,
    bodies     bytea[]     NOT NULL,
    digests    bigint[]    NOT NULL,
    CHECK (cardinality(event_ids) = cardinality(bodies) AND cardinality(event_ids) = cardinality(digests))
);
CREATE INDEX attempt_batch_source ON attempt_batch (source_id);
-- Rows live for milliseconds: compressing them is wasted time, and the dead ones must not pile up.
ALTER TABLE attempt_batch
    ALTER event_ids SET STORAGE EXTERNAL,
    ALTER bodies SET STORAGE EXTERNAL,
    ALTER digests SET STORAGE EXTERNAL;
ALTER TABLE attempt_batch SET (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 10000);

-- Attempts that ended without a payment. A charge belongs to the event, not to the group.
CREATE TABLE payment_attempt (
    event_id           uuid        PRIMARY KEY,
    event_digest       bigint      NOT NULL,
    body               bytea,      -- must be posted again as it is; NULL: never built
    first_attempt_at   timestamptz NOT NULL,
    last_attempt_at    timestamptz NOT NULL,
    unknown_answers    integer     NOT NULL CHECK (unknown_answers >= 0),
    answer             text,
    provider_charge_id text
);

-- Records that are not applied. What came from Kafka is bytea, because no text type takes every byte.
CREATE TABLE held_event (
    id                 bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source_id          integer     NOT NULL,
    source_offset      bigint      NOT NULL,
    record_digest      bigint      NOT NULL,
    record_timestamp   bigint,     -- milliseconds since 1970, as the topic keeps them
    event_id           uuid,
    key                bytea,
    key_digest         bigint,     -- events of one key keep their order; NULL: without a key, it stands alone
    headers            bytea       NOT NULL, -- number of headers, then name and value, each behind its length
    payload            bytea,
    reason             text        NOT NULL,
    error              text        NOT NULL,
    state              text        NOT NULL
                       CHECK (state IN ('retrying', 'waiting', 'parked', 'queued', 'applied', 'discarded')),
    owns_claim         boolean     NOT NULL,
    wanted             text,       -- an operator's request; the owner carries it out
    actor              text,
    note               text,       -- the operator's reason, and what became of the request
    provider_charge_id text,
    attempts           integer     NOT NULL CHECK (attempts >= 0),
    next_attempt_at    timestamptz,
    first_tried_at     timestamptz, -- bounds the retries; NULL while it waits for its turn
    held_at            timestamptz NOT NULL DEFAULT now(),
    relayed_at         timestamptz, -- a dead letter was written since it was parked
    UNIQUE (source_id, source_offset, record_digest),
    CHECK (state <> 'retrying' OR next_attempt_at IS NOT NULL)
);
-- What is known of an id whose claim may be forgotten: asked only for ids below the floor.
CREATE INDEX held_event_event ON held_event (event_id);
-- Four indexes that hold few rows each. What is open: asked after every batch that holds something, and bounded by held.max_open.
CREATE INDEX held_event_open ON held_event (source_id, key_digest, id) WHERE state IN ('retrying', 'waiting', 'parked', 'queued');
-- What operators ask for: looked at every second.
CREATE INDEX held_event_wanted ON held_event (source_id) WHERE wanted IS NOT NULL;
-- What must stay discarded when it is read again, and has no claim that says so.
CREATE INDEX held_event_discarded ON held_event (source_id, source_offset) WHERE state = 'discarded' AND NOT owns_claim;
-- Dead letters that are not in their topic yet.
CREATE INDEX held_event_unrelayed ON held_event (source_id, id) WHERE state = 'parked' AND relayed_at IS NULL;

-- What operators have decided: who, when, what, on which, why. A hold counts as long as its row is there: no record at its offset is
-- applied before an operator says so. Nothing here is ever changed.
CREATE TABLE operator_action (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    decided_at    timestamptz NOT NULL DEFAULT now(),
    actor         text        NOT NULL,
    action        text        NOT NULL, -- pause, resume, hold, skip, or what is asked for in held_event.wanted
    source_id     integer     NOT NULL,
    source_offset bigint,     -- of the record; NULL: of the partition
    to_offset     bigint,     -- of a skip: one past its last
    held_id       bigint,     -- of a request: the row that is asked for
    reason        text        NOT NULL
);
-- What must be held: read by every new owner.
CREATE INDEX operator_action_hold ON operator_action (source_id) WHERE action = 'hold';

-- Claims of replays below the floor: never dropped, few.
CREATE TABLE horizon_claim (
    event_id       uuid NOT NULL,
    consumer_group text NOT NULL,
    PRIMARY KEY (event_id, consumer_group)
);

-- An id below the floor is forgotten and never new again. The floor is only ever raised.
CREATE TABLE retention (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    floor    uuid    NOT NULL
);
