//! What librdkafka knows and its wrapper does not tell, or tells with a panic.
//!
//! In: a message or a consumer, borrowed. Out: owned bytes and numbers. It owns nothing; every pointer dies with the borrow.
//!
//! Invariant: whatever bytes a producer sent, they arrive whole and nothing panics.

use rdkafka::bindings as native;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{BorrowedMessage, Message};

use crate::pipeline::rebalance::Rebalances;
use crate::record::{Header, NextOffset, Offset, Record};

/// Copies everything out of librdkafka's memory.
pub(crate) fn own(message: &BorrowedMessage<'_>) -> Record {
    Record {
        partition: message.partition(),
        offset: Offset(message.offset()),
        timestamp_ms: message.timestamp().to_millis(),
        key: message.key().map(Box::from),
        headers: own_headers(message),
        payload: message.payload().map(Box::from),
    }
}

/// The headers as bytes. The wrapper's own accessor panics on a name that is not UTF-8 (CASES A15), so librdkafka is asked directly.
fn own_headers(message: &BorrowedMessage<'_>) -> Box<[Header]> {
    let mut headers = std::ptr::null_mut();
    // SAFETY: the message is alive, and the list it hands out lives as long as the message.
    let code = unsafe { native::rd_kafka_message_headers(message.ptr(), &raw mut headers) };
    if code != native::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
        return Box::default();
    }
    let mut owned = Vec::new();
    loop {
        let (mut name, mut value, mut size) = (std::ptr::null(), std::ptr::null(), 0);
        // SAFETY: an index past the end is answered with an error code; the three out-pointers are ours.
        let code = unsafe { native::rd_kafka_header_get_all(headers, owned.len(), &raw mut name, &raw mut value, &raw mut size) };
        if code != native::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            return owned.into_boxed_slice();
        }
        // SAFETY: librdkafka ends every name with a NUL of its own.
        let name = unsafe { std::ffi::CStr::from_ptr(name) }.to_bytes().into();
        // SAFETY: a value that is not null has `size` bytes, alive as long as the message.
        let value = (!value.is_null()).then(|| unsafe { std::slice::from_raw_parts(value.cast::<u8>(), size) }.into());
        owned.push((name, value));
    }
}

/// The broker that settings are asked of, as of the last metadata: no request is made.
pub(crate) fn controller<C: rdkafka::ClientContext>(client: &rdkafka::client::Client<C>) -> Option<i32> {
    // SAFETY: the client is alive while it is borrowed.
    let id = unsafe { native::rd_kafka_controllerid(client.native_ptr(), 0) };
    (id >= 0).then_some(id)
}

/// One past the newest record, as of the last fetch answer: no request is made.
pub(super) fn cached_log_end(consumer: &BaseConsumer<Rebalances>, topic: &str, partition: i32) -> Option<NextOffset> {
    let topic = std::ffi::CString::new(topic).ok()?;
    let (mut low, mut high) = (0, 0);
    // SAFETY: the client is alive while the consumer is borrowed; the out-pointers are ours.
    let code = unsafe {
        native::rd_kafka_get_watermark_offsets(
            consumer.client().native_ptr(),
            topic.as_ptr(),
            partition,
            &raw mut low,
            &raw mut high,
        )
    };
    (code == native::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR && high >= 0).then_some(NextOffset(high))
}
