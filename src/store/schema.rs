// @generated automatically by Diesel CLI.

diesel::table! {
    attempt_batch (id) {
        id -> Int8,
        source_id -> Int4,
        epoch -> Int8,
        started_at -> Timestamptz,
        event_ids -> Array<Nullable<Uuid>>,
        bodies -> Array<Nullable<Bytea>>,
        digests -> Array<Nullable<Int8>>,
    }
}

diesel::table! {
    consumed_partition (id) {
        id -> Int4,
        consumer_group -> Text,
        topic -> Text,
        partition -> Int4,
        owner -> Text,
        epoch -> Int8,
        next_offset -> Nullable<Int8>,
        last_record_digest -> Nullable<Int8>,
        doubt_offset -> Nullable<Int8>,
        doubt_before -> Nullable<Timestamptz>,
        system_identifier -> Nullable<Int8>,
        timeline -> Nullable<Int4>,
        safe_time -> Nullable<Timestamptz>,
        remember_ms -> Nullable<Int8>,
        remember_why -> Nullable<Text>,
        skips -> Nullable<Int8multirange>,
        paused -> Nullable<Text>,
        paused_by -> Nullable<Text>,
        updated_at -> Timestamptz,
    }
}

diesel::table! {
    held_event (id) {
        id -> Int8,
        source_id -> Int4,
        source_offset -> Int8,
        record_digest -> Int8,
        record_timestamp -> Nullable<Int8>,
        event_id -> Nullable<Uuid>,
        key -> Nullable<Bytea>,
        key_digest -> Nullable<Int8>,
        headers -> Bytea,
        payload -> Nullable<Bytea>,
        reason -> Text,
        error -> Text,
        state -> Text,
        owns_claim -> Bool,
        wanted -> Nullable<Text>,
        actor -> Nullable<Text>,
        note -> Nullable<Text>,
        provider_charge_id -> Nullable<Text>,
        attempts -> Int4,
        next_attempt_at -> Nullable<Timestamptz>,
        first_tried_at -> Nullable<Timestamptz>,
        held_at -> Timestamptz,
        relayed_at -> Nullable<Timestamptz>,
    }
}

diesel::table! {
    horizon_claim (event_id, consumer_group) {
        event_id -> Uuid,
        consumer_group -> Text,
    }
}

diesel::table! {
    operator_action (id) {
        id -> Int8,
        decided_at -> Timestamptz,
        actor -> Text,
        action -> Text,
        source_id -> Int4,
        source_offset -> Nullable<Int8>,
        to_offset -> Nullable<Int8>,
        held_id -> Nullable<Int8>,
        reason -> Text,
    }
}

diesel::table! {
    payment (event_id) {
        event_id -> Uuid,
        order_id -> Int8,
        customer_id -> Int8,
        amount -> Numeric,
        currency -> Text,
        status -> Text,
        provider_charge_id -> Nullable<Text>,
        attempts -> Int4,
        created_at -> Timestamptz,
    }
}

diesel::table! {
    payment_attempt (event_id) {
        event_id -> Uuid,
        event_digest -> Int8,
        body -> Nullable<Bytea>,
        first_attempt_at -> Timestamptz,
        last_attempt_at -> Timestamptz,
        unknown_answers -> Int4,
        answer -> Nullable<Text>,
        provider_charge_id -> Nullable<Text>,
    }
}

diesel::table! {
    processed_event (event_id, consumer_group) {
        event_id -> Uuid,
        consumer_group -> Text,
        processed_at -> Timestamptz,
        event_digest -> Nullable<Int8>,
        source_id -> Nullable<Int4>,
        source_offset -> Nullable<Int8>,
    }
}

diesel::table! {
    retention (only_row) {
        only_row -> Bool,
        floor -> Uuid,
    }
}

diesel::allow_tables_to_appear_in_same_query!(
    attempt_batch,
    consumed_partition,
    held_event,
    horizon_claim,
    operator_action,
    payment,
    payment_attempt,
    processed_event,
    retention,
);
