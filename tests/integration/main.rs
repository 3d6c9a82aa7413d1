//! Tests on a real Kafka and a real PostgreSQL; `scripts/test` starts both. Each file is a chapter, each test a sentence.

mod a_duplicate_delivery_applies_once;
mod support;

mod the_harness_itself;
mod the_store;
