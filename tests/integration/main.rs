//! Tests on a real Kafka and a real PostgreSQL; `scripts/test` starts both. Each file is a chapter, each test a sentence.

mod a_crash_around_the_charge_leaves_one_charge;
mod a_duplicate_delivery_applies_once;
mod a_replay_charges_nothing_again;
mod a_second_process_joins_and_leaves_cleanly;
mod a_start_never_loses_a_record;
mod a_wrong_set_up_is_refused_before_anything_is_read;
mod another_handler_needs_nothing_but_the_trait;
mod five_processes_start_at_once;
mod never_more_than_partition_concurrency_transactions_are_open;
mod poison_is_held_and_the_partition_moves_on;
mod sigterm_under_load_ends_in_order;
mod support;
mod the_first_event_of_a_batch_fails_and_the_rest_commit;
mod the_harness_itself;
mod the_key_and_the_bytes_of_a_charge_never_change;
mod the_reconciler_finds_what_is_planted;
mod the_same_id_with_another_payload_is_held;
mod the_store;
