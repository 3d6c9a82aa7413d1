//! Kafka clients, made in one place, and what their failures mean to whoever set them up.
//!
//! In: a configuration and a context. Out: a client that has its first bearer token already, for most of ours are asked something and
//! dropped before anybody polls them, and librdkafka asks for a token only in `poll` (CASES A16). It owns nothing.
//!
//! Invariant: every context of ours renews tokens with [`renew`], and no other code makes a client.

use std::error::Error;
use std::ffi::{CStr, CString};
use std::fmt::Display;
use std::time::Duration;

use rdkafka::admin::AdminClient;
use rdkafka::bindings as native;
use rdkafka::client::OAuthToken;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::metadata::{Metadata, MetadataTopic};
use rdkafka::producer::{BaseProducer, FutureProducer, Producer, ProducerContext};
use rdkafka::{ClientConfig, ClientContext};

use crate::config::{TOKEN_FILE, Token};
use crate::pipeline::client_log::ClientLog;

/// The context of a client that is asked something, or writes.
#[derive(Debug, Default)]
pub(crate) struct Plain(ClientLog);

impl ClientContext for Plain {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn generate_oauth_token(&self, file: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        renew(file)
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        ClientLog::line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        // Whoever reads to the end wants to hear of it.
        if error.rdkafka_error_code() != Some(RDKafkaErrorCode::PartitionEOF) {
            self.0.error(&error, reason);
        }
    }
}

impl ConsumerContext for Plain {}

/// A client of any kind.
pub(crate) trait Connected {
    /// librdkafka's own.
    fn native(&self) -> *mut native::rd_kafka_t;
}

impl<C: ConsumerContext> Connected for BaseConsumer<C> {
    fn native(&self) -> *mut native::rd_kafka_t {
        self.client().native_ptr()
    }
}

impl<C: ProducerContext> Connected for BaseProducer<C> {
    fn native(&self) -> *mut native::rd_kafka_t {
        self.client().native_ptr()
    }
}

impl<C: ClientContext + 'static> Connected for FutureProducer<C> {
    fn native(&self) -> *mut native::rd_kafka_t {
        self.client().native_ptr()
    }
}

impl<C: ClientContext> Connected for AdminClient<C> {
    fn native(&self) -> *mut native::rd_kafka_t {
        self.inner().native_ptr()
    }
}

/// Makes a client.
///
/// # Errors
/// librdkafka refuses the configuration.
pub(crate) fn connect<C, T>(config: &ClientConfig, context: C) -> KafkaResult<T>
where
    C: ClientContext,
    T: FromClientConfigAndContext<C> + Connected,
{
    let client: T = config.create_with_context(context)?;
    if let Some(file) = config.get(TOKEN_FILE) {
        give_token(&client, file);
    }
    Ok(client)
}

/// The token as it stands in the file now. For [`ClientContext::generate_oauth_token`].
pub(crate) fn renew(file: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
    let Token { text, subject, expires_ms } = Token::read(file.ok_or("kafka.oauth_token_file is not set")?)?;
    Ok(OAuthToken { token: text, principal_name: subject, lifetime_ms: expires_ms })
}

/// A token that does not come is told like any error of the client, and asked for again by librdkafka.
fn give_token(client: &impl Connected, file: &str) {
    let given = Token::read(file).and_then(|token| {
        let no_nul = |text: &str| CString::new(text).map_err(|error| error.to_string());
        let (text, subject) = (no_nul(&token.text)?, no_nul(&token.subject)?);
        let mut why = [0; 512];
        // SAFETY: the client is borrowed; the texts live through the call and are copied; what is written to has the size that is told.
        let code = unsafe {
            native::rd_kafka_oauthbearer_set_token(
                client.native(),
                text.as_ptr(),
                token.expires_ms,
                subject.as_ptr(),
                std::ptr::null_mut(),
                0,
                why.as_mut_ptr(),
                why.len(),
            )
        };
        if code == native::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            return Ok(());
        }
        // SAFETY: librdkafka ends what it writes with a NUL.
        Err(unsafe { CStr::from_ptr(why.as_ptr()) }.to_string_lossy().into_owned())
    });
    if let Err(why) = given {
        let why = CString::new(why).unwrap_or_default();
        // SAFETY: the client is borrowed; the text lives through the call and is copied.
        unsafe { native::rd_kafka_oauthbearer_set_token_failure(client.native(), why.as_ptr()) };
    }
}

/// Why a question had no answer.
pub(crate) fn why(client: &impl Connected, error: &KafkaError) -> String {
    told(client).unwrap_or_else(|| plainly(error))
}

/// What the broker has against us, as it waits in the client's queue. What else waits there is dropped: it is a client that is asked and not
/// polled.
pub(crate) fn told(client: &impl Connected) -> Option<String> {
    let mut told = None;
    // SAFETY: the client is borrowed; the queue and each event are given back below, and every text is copied before.
    unsafe {
        let queue = native::rd_kafka_queue_get_main(client.native());
        loop {
            let event = native::rd_kafka_queue_poll(queue, 0);
            if event.is_null() {
                break;
            }
            if native::rd_kafka_event_type(event) == native::RD_KAFKA_EVENT_ERROR {
                let text = CStr::from_ptr(native::rd_kafka_event_error_string(event)).to_string_lossy();
                let todo = todo_about(native::rd_kafka_event_error(event).into(), &text);
                told = todo.map(|todo| format!("{}: {todo}", text.trim())).or(told);
            }
            native::rd_kafka_event_destroy(event);
        }
        native::rd_kafka_queue_destroy(queue);
    }
    told
}

/// The topic in an answer that was asked for it.
///
/// # Errors
/// In words: it is not there, or not for us.
pub(crate) fn topic<'a>(metadata: &'a Metadata, name: &str) -> Result<&'a MetadataTopic, String> {
    let topic = metadata.topics().iter().find(|topic| topic.name() == name);
    match topic.and_then(|topic| topic.error()).map(RDKafkaErrorCode::from) {
        Some(RDKafkaErrorCode::UnknownTopicOrPartition) | None => {}
        Some(code) => return Err(in_words(code)),
    }
    topic.filter(|topic| !topic.partitions().is_empty()).ok_or_else(|| format!("the topic {name} does not exist"))
}

/// With what to do, where it can be told.
pub(crate) fn in_words(code: RDKafkaErrorCode) -> String {
    with_todo(&code, Some(code))
}

/// The same of an error.
pub(crate) fn plainly(error: &KafkaError) -> String {
    with_todo(error, error.rdkafka_error_code())
}

fn with_todo(said: &impl Display, code: Option<RDKafkaErrorCode>) -> String {
    code.and_then(todo).map_or_else(|| said.to_string(), |todo| format!("{said}: {todo}"))
}

/// What a person has to do about an error that waiting alone does not mend; `None` for all others.
pub(crate) const fn todo(code: RDKafkaErrorCode) -> Option<&'static str> {
    Some(match code {
        RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SaslAuthenticationFailed => {
            "the broker does not take us for whom we say we are; see sasl.mechanism, sasl.username and the password, or kafka.oauth_token_file"
        }
        RDKafkaErrorCode::SSL => {
            "TLS fails; see ssl.ca.location (who vouches for the broker), the names in its certificate, and ssl.certificate.location (who we are)"
        }
        RDKafkaErrorCode::TopicAuthorizationFailed => {
            "our principal needs Read on the topic, Write where it writes, Describe where it only asks (ops/acls.sh)"
        }
        RDKafkaErrorCode::GroupAuthorizationFailed => {
            "our principal needs Read on the consumer group, or Describe where it only asks (ops/acls.sh)"
        }
        RDKafkaErrorCode::ClusterAuthorizationFailed => "our principal needs DescribeConfigs on the cluster (ops/acls.sh)",
        _ => return None,
    })
}

/// The same, with what the client says beside the code: by TLS 1.3 a broker refuses a certificate when all hands are shaken already, and
/// librdkafka takes that for a connection that broke.
pub(crate) fn todo_about(code: RDKafkaErrorCode, reason: &str) -> Option<&'static str> {
    let alert = code == RDKafkaErrorCode::BrokerTransportFailure && reason.contains("SSL alert");
    todo(if alert { RDKafkaErrorCode::SSL } else { code })
}

/// How often the file of a password is looked at while a client lives.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// From now on the client logs in like this; connections that are open stay.
pub(crate) fn log_in_as(client: &impl Connected, config: &ClientConfig) {
    let (Some(user), Some(password)) = (config.get("sasl.username"), config.get("sasl.password")) else { return };
    let (Ok(user), Ok(password)) = (CString::new(user), CString::new(password)) else { return };
    // SAFETY: the client is borrowed; the texts live through the call and are copied; an error is given back.
    unsafe {
        let error = native::rd_kafka_sasl_set_credentials(client.native(), user.as_ptr(), password.as_ptr());
        if !error.is_null() {
            native::rd_kafka_error_destroy(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_in_needs_no_library_of_the_machine() {
        let features = ClientConfig::new().create_native_config().expect("a configuration").get("builtin.features").expect("known");
        let has: Vec<&str> = features.split(',').map(str::trim).collect();
        for wanted in ["ssl", "sasl_plain", "sasl_scram", "sasl_oauthbearer"] {
            assert!(has.contains(&wanted), "{wanted}: {features}");
        }
    }

    #[test]
    fn clients_are_made_here_and_nowhere_else() {
        let mut folders = vec![std::path::PathBuf::from("src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if !["src/lab", "src/testing.rs", "src/pipeline/connection.rs"].iter().any(|other| path.starts_with(other)) {
                    let text = std::fs::read_to_string(&path).expect("a source file");
                    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
                    let makes = code.contains(".create()") || code.contains("create_with_context");
                    assert!(!makes, "{}: use pipeline::connection::connect", path.display());
                }
            }
        }
    }
}
