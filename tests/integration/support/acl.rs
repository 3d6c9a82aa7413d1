//! Rights in Kafka, one by one and at once: what `ops/acls.sh` gives in whole.

use std::ffi::{CStr, CString};
use std::process::Command;

use rdkafka::admin::AdminClient;
use rdkafka::bindings as native;
use rdkafka::client::DefaultClientContext;

use super::LIMIT;
use super::topic::admin;

/// One right on one thing, as `kafka-acls.sh` calls both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Right {
    pub operation: String,
    /// `--topic`, `--group`, `--cluster`.
    pub kind: String,
    pub name: String,
}

/// Gives rights and takes them away.
pub struct Rights(AdminClient<DefaultClientContext>);

/// What the script gives for a command, in its order.
pub fn documented_rights(command: &str, topic: &str, group: &str) -> Vec<Right> {
    let mut script = Command::new("sh");
    script.args(["-f", "ops/acls.sh", command, "User:nobody"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    script.env("KAFKA_ACLS", "echo").env("TOPIC", topic).env("GROUP", group);
    let told = script.output().expect("a shell");
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    String::from_utf8(told.stdout).expect("text").lines().flat_map(rights_of).collect()
}

/// Each operation of a line on each of its things.
fn rights_of(line: &str) -> Vec<Right> {
    let mut words = line.split_whitespace();
    let (mut operations, mut things) = (Vec::new(), Vec::new());
    while let Some(word) = words.next() {
        match word {
            "--add" => {}
            "--allow-principal" => drop(words.next()),
            "--operation" => operations.push(words.next().expect("an operation")),
            "--cluster" => things.push((word, "kafka-cluster")),
            _ => things.push((word, words.next().expect("a name"))),
        }
    }
    let right = |operation: &str, kind: &str, name: &str| Right {
        operation: operation.to_owned(),
        kind: kind.to_owned(),
        name: name.to_owned(),
    };
    things.iter().flat_map(|(kind, name)| operations.iter().map(move |operation| right(operation, kind, name))).collect()
}

impl Rights {
    /// By the administrator at these brokers.
    pub fn at(brokers: &str) -> Self {
        Self(admin(brokers))
    }

    pub fn give(&self, user: &str, right: &Right) {
        let (name, principal) = texts(user, right);
        let (kind, operation, mut why) = (kind(right), operation(right), [0; 512]);
        // SAFETY: the texts live through the call and are copied; what is written to has the size that is told. The binding is given
        // back after the request, which has its own copy.
        self.ask(native::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_CREATEACLS, |client, options, queue| unsafe {
            let mut binding = native::rd_kafka_AclBinding_new(
                kind,
                name.as_ptr(),
                LITERAL,
                principal.as_ptr(),
                c"*".as_ptr(),
                operation,
                ALLOW,
                why.as_mut_ptr(),
                why.len(),
            );
            assert!(!binding.is_null(), "{right:?}");
            native::rd_kafka_CreateAcls(client, &raw mut binding, 1, options, queue);
            native::rd_kafka_AclBinding_destroy(binding);
        });
    }

    pub fn take(&self, user: &str, right: &Right) {
        let (name, principal) = texts(user, right);
        let (kind, operation, mut why) = (kind(right), operation(right), [0; 512]);
        // SAFETY: as above.
        self.ask(native::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DELETEACLS, |client, options, queue| unsafe {
            let mut filter = native::rd_kafka_AclBindingFilter_new(
                kind,
                name.as_ptr(),
                LITERAL,
                principal.as_ptr(),
                c"*".as_ptr(),
                operation,
                ALLOW,
                why.as_mut_ptr(),
                why.len(),
            );
            assert!(!filter.is_null(), "{right:?}");
            native::rd_kafka_DeleteAcls(client, &raw mut filter, 1, options, queue);
            native::rd_kafka_AclBinding_destroy(filter);
        });
    }

    /// One request, and its answer. That a single right was refused shows in what it lets happen.
    fn ask(
        &self,
        what: native::rd_kafka_admin_op_t,
        request: impl FnOnce(*mut native::rd_kafka_t, *mut native::rd_kafka_AdminOptions_t, *mut native::rd_kafka_queue_t),
    ) {
        let client = self.0.inner().native_ptr();
        let limit = i32::try_from(LIMIT.as_millis()).expect("a minute");
        // SAFETY: the client is borrowed; options, queue and event are given back below, and the text is copied before.
        unsafe {
            let (options, queue) = (native::rd_kafka_AdminOptions_new(client, what), native::rd_kafka_queue_new(client));
            request(client, options, queue);
            let event = native::rd_kafka_queue_poll(queue, limit);
            assert!(!event.is_null(), "the broker answers");
            let error = native::rd_kafka_event_error_string(event);
            let error = if error.is_null() { String::new() } else { CStr::from_ptr(error).to_string_lossy().into_owned() };
            let done = native::rd_kafka_event_error(event) == native::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR;
            native::rd_kafka_event_destroy(event);
            native::rd_kafka_queue_destroy(queue);
            native::rd_kafka_AdminOptions_destroy(options);
            assert!(done, "{error}");
        }
    }
}

const LITERAL: native::rd_kafka_ResourcePatternType_t = native::rd_kafka_ResourcePatternType_t::RD_KAFKA_RESOURCE_PATTERN_LITERAL;
const ALLOW: native::rd_kafka_AclPermissionType_t = native::rd_kafka_AclPermissionType_t::RD_KAFKA_ACL_PERMISSION_TYPE_ALLOW;

fn texts(user: &str, right: &Right) -> (CString, CString) {
    let text = |text: &str| CString::new(text).expect("a name without NUL");
    (text(&right.name), text(&format!("User:{user}")))
}

fn kind(right: &Right) -> native::rd_kafka_ResourceType_t {
    use native::rd_kafka_ResourceType_t as Kind;
    match right.kind.as_str() {
        "--topic" => Kind::RD_KAFKA_RESOURCE_TOPIC,
        "--group" => Kind::RD_KAFKA_RESOURCE_GROUP,
        "--cluster" => Kind::RD_KAFKA_RESOURCE_BROKER,
        other => panic!("a kind that no test knows: {other}"),
    }
}

fn operation(right: &Right) -> native::rd_kafka_AclOperation_t {
    use native::rd_kafka_AclOperation_t as Operation;
    match right.operation.as_str() {
        "Read" => Operation::RD_KAFKA_ACL_OPERATION_READ,
        "Write" => Operation::RD_KAFKA_ACL_OPERATION_WRITE,
        "Describe" => Operation::RD_KAFKA_ACL_OPERATION_DESCRIBE,
        "DescribeConfigs" => Operation::RD_KAFKA_ACL_OPERATION_DESCRIBE_CONFIGS,
        other => panic!("an operation that no test knows: {other}"),
    }
}
