//! A record with a header that the Rust client cannot write: a name is text for it, and bytes for Kafka.

use rdkafka::bindings as native;
use rdkafka::producer::{BaseProducer, Producer as _};

use super::topic::client;
use super::{LIMIT, Topic};

impl Topic {
    /// Sends one record with one header, whose name is any bytes, and waits until the broker has it: its offset.
    pub fn send_with_raw_header(&self, partition: i32, payload: &[u8], name: &[u8], value: Option<&[u8]>) -> i64 {
        use native::rd_kafka_vtype_t as Part;
        const COPY: i32 = 2; // RD_KAFKA_MSG_F_COPY
        let producer: BaseProducer = client(self.brokers()).set("acks", "all").create().expect("a producer");
        let topic = std::ffi::CString::new(self.name()).expect("a name without NUL");
        // SAFETY: the client and the topic's name outlive the calls; lengths are those of the slices; librdkafka copies the payload and
        // owns the headers once it has taken the record, and each part has the type that its tag asks for.
        let taken = unsafe {
            let headers = native::rd_kafka_headers_new(1);
            let (at, size) = value.map_or((std::ptr::null(), 0), |value| (value.as_ptr(), value.len().cast_signed()));
            let added = native::rd_kafka_header_add(headers, name.as_ptr().cast(), name.len().cast_signed(), at.cast(), size);
            assert_eq!(added, native::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR);
            native::rd_kafka_producev(
                producer.client().native_ptr(),
                Part::RD_KAFKA_VTYPE_TOPIC,
                topic.as_ptr(),
                Part::RD_KAFKA_VTYPE_PARTITION,
                partition,
                Part::RD_KAFKA_VTYPE_MSGFLAGS,
                COPY,
                Part::RD_KAFKA_VTYPE_VALUE,
                payload.as_ptr(),
                payload.len(),
                Part::RD_KAFKA_VTYPE_HEADERS,
                headers,
                Part::RD_KAFKA_VTYPE_END,
            )
        };
        assert_eq!(taken, native::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR);
        producer.flush(LIMIT).expect("the broker takes it");
        self.ends()[&partition] - 1
    }
}
