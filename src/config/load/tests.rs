use std::io::Write;
use std::time::Duration;

use super::*;
use crate::config::{AmountForm, Assignor, LogFormat, ProviderKind, Start, example};

const ALL: &[Need] = &[Need::Kafka, Need::Database, Need::Provider];

const REQUIRED: &[(&str, &str)] = &[
    ("ONCEWARD_KAFKA_BROKERS", "k:9092"),
    ("ONCEWARD_DATABASE_URL", "postgres://bill:hunter2@db:5432/money"),
    ("ONCEWARD_PROVIDER_URL", "http://pay:8080"),
];

fn environment(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

fn read(text: &str, pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
    Config::read(("test.toml", text), environment(pairs), ALL)
}

fn read_with_required(text: &str) -> Result<Config, ConfigError> {
    read(text, REQUIRED)
}

/// Asserts that exactly these keys are at fault, and gives the message.
#[track_caller]
fn faulty(result: Result<Config, ConfigError>, keys: &[&str]) -> String {
    let error = result.expect_err("there is a fault");
    let mut found: Vec<&str> = error.faults.iter().map(|fault| fault.key.as_str()).collect();
    let mut wanted = keys.to_vec();
    found.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(found, wanted, "{error}");
    error.to_string()
}

fn scratch(name: &str, content: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("onceward-config-{}-{name}", std::process::id()));
    std::fs::File::create(&path).and_then(|mut file| file.write_all(content.as_bytes())).expect("a temporary file");
    path
}

#[test]
fn the_example_file_parses_and_equals_the_defaults() {
    let mut reading = Reading::default();
    reading.file("example", &example());
    assert_eq!(reading.faults, []);
    assert_eq!(reading.config, Config::default());
}

#[test]
fn the_example_file_with_its_comments_opened_is_a_whole_configuration() {
    let opened: String = example()
        .lines()
        .filter(|line| !line.contains("_file = ") && !line.contains("otlp_endpoint")) // not there: such files; perhaps the feature
        .map(|line| line.strip_prefix("# ").filter(|rest| rest.contains(" = ")).unwrap_or(line).to_owned() + "\n")
        .collect();
    let config = read(&opened, &[]).expect("nothing is missing");
    assert_eq!(config.kafka.options.get("fetch.wait.max.ms"), Some("100"));
}

#[test]
fn the_defaults_pass_every_check_once_the_required_keys_are_there() {
    let config = read_with_required("").expect("valid");
    assert_eq!(config.kafka.topic, "orders.confirmed");
    assert_eq!(config.kafka.group, "billing-order-confirmed");
    assert_eq!(config.kafka.start, Start::Earliest);
    assert_eq!(config.pipeline.partition_concurrency, 3);
    assert_eq!(config.retention.retention, Duration::from_secs(7 * 86_400));
}

#[test]
fn what_a_command_needs_is_required_and_nothing_else() {
    faulty(Config::load(None, [], ALL).map(|_| Config::default()), &["kafka.brokers", "database.url", "provider.url"]);
    assert!(Config::load(None, [], &[]).is_ok());
    faulty(Config::load(None, [], &[Need::Database]).map(|_| Config::default()), &["database.url"]);
    let none = environment(&[("ONCEWARD_PROVIDER_KIND", "none")]);
    assert_eq!(Config::load(None, none, &[Need::Provider]).expect("no URL is needed").provider.kind, ProviderKind::None);
}

#[test]
fn the_environment_stands_over_the_file() {
    let text = "[kafka]\ntopic = \"from.file\"\nassignor = \"range\"\n[log]\nformat = \"json\"\n";
    let mut pairs = REQUIRED.to_vec();
    pairs.extend([
        ("ONCEWARD_KAFKA_TOPIC", "from.environment"),
        ("ONCEWARD_PIPELINE_BATCH_MAX", "1_024"),
        ("ONCEWARD_PROVIDER_AMOUNT", "minor_units"),
        ("ONCEWARD_PROVIDER_REPLAYS_STORED_ANSWERS", "true"),
    ]);
    let config = read(text, &pairs).expect("valid");
    assert_eq!(config.kafka.topic, "from.environment");
    assert_eq!(config.kafka.assignor, Assignor::Range);
    assert_eq!(config.log.format, LogFormat::Json);
    assert_eq!(config.pipeline.batch_max, 1_024);
    assert_eq!(config.provider.amount, AmountForm::MinorUnits);
    assert!(config.provider.replays_stored_answers);
}

#[test]
fn every_variable_names_one_key_and_none_looks_like_a_service_link() {
    let mut variables: Vec<String> = KEYS.iter().map(Key::variable).collect();
    assert!(variables.iter().all(|name| !is_not_ours(name)));
    variables.sort();
    let all = variables.len();
    variables.dedup();
    assert_eq!(variables.len(), all);
}

#[test]
fn unknown_keys_are_refused_in_the_file_and_in_the_environment() {
    let text = "topic = \"x\"\n[kafka]\ntopik = \"x\"\nbrokers_file = \"x\"\n[kafak]\ntopic = \"x\"\n";
    let mut pairs = REQUIRED.to_vec();
    pairs.extend([
        ("ONCEWARD_KAFKA_TOPIK", "x"),
        ("ONCEWARD__KAFKA__TOPIC", "x"),
        ("ONCEWARD_KAFKA_OPTIONS", "x"),
        ("UNRELATED", "x"),
    ]);
    let message = faulty(
        read(text, &pairs),
        &[
            "topic",
            "kafka.topik",
            "kafka.brokers_file",
            "kafak",
            "ONCEWARD_KAFKA_OPTIONS",
            "ONCEWARD_KAFKA_TOPIK",
            "ONCEWARD__KAFKA__TOPIC",
        ],
    );
    assert!(message.contains("kafka.topik (test.toml): is not a key; [kafka] has brokers, topic, group,"), "{message}");
}

#[test]
fn variables_of_kubernetes_and_of_the_tests_are_not_taken_for_keys() {
    let mut pairs = REQUIRED.to_vec();
    pairs.extend([
        ("ONCEWARD_SERVICE_HOST", "10.0.0.1"),
        ("ONCEWARD_SERVICE_PORT", "9464"),
        ("ONCEWARD_SERVICE_PORT_METRICS", "9464"),
        ("ONCEWARD_PORT", "tcp://10.0.0.1:9464"),
        ("ONCEWARD_PORT_9464_TCP_ADDR", "10.0.0.1"),
        ("ONCEWARD_METRICS_PORT_9464_TCP", "tcp://10.0.0.1:9464"),
        ("ONCEWARD_CONFIG", "onceward.toml"),
        ("ONCEWARD_TEST_KAFKA", "127.0.0.1:1"),
    ]);
    assert!(read("", &pairs).is_ok());
}

#[test]
fn all_faults_are_reported_at_once_each_with_what_would_be_valid() {
    let text = r#"
        [kafka]
        start = "middle"
        session_timeout_ms = "20 s"
        [pipeline]
        partition_concurrency = 0
        batch_max = -1
        [database]
        lock_timeout_ms = 0
        [provider]
        url = "ftp://pay"
        replays_stored_answers = "yes"
        [admin]
        listen = "localhost"
    "#;
    let message = faulty(
        read(text, &REQUIRED[..1]),
        &[
            "kafka.start",
            "kafka.session_timeout_ms",
            "pipeline.batch_max",
            "database.lock_timeout_ms",
            "provider.url",
            "provider.replays_stored_answers",
            "admin.listen",
            "database.url",
            "pipeline.partition_concurrency",
        ],
    );
    for valid in [
        "must be `earliest` or `latest`",
        "must be a whole number of milliseconds from 1",
        "such as \"127.0.0.1:9464\"",
        "must be from 1 to 256",
    ] {
        assert!(message.contains(valid), "{valid}: {message}");
    }
}

#[test]
fn options_that_carry_the_guarantee_are_refused_from_the_file_and_the_environment() {
    let text = "[kafka.options]\nenable.auto.commit = true\n\"group.id\" = \"x\"\nfetch.wait.max.ms = 7\nnonsense = 1\n";
    let mut pairs = REQUIRED.to_vec();
    pairs.push(("ONCEWARD_KAFKA_OPTIONS_AUTO_OFFSET_RESET", "latest"));
    let message = faulty(
        read(text, &pairs),
        &[
            "kafka.options.enable.auto.commit",
            "kafka.options.group.id",
            "kafka.options.nonsense",
            "kafka.options.auto.offset.reset",
        ],
    );
    assert!(message.contains("R-KFK-CONS-X1"), "{message}");
    faulty(read_with_required("[kafka]\noptions = 5"), &["kafka.options"]);
}

#[test]
fn options_come_from_the_file_in_either_spelling_and_from_the_environment() {
    let text = "[kafka.options]\nfetch.wait.max.ms = 7\n\"socket.keepalive.enable\" = true\n";
    let mut pairs = REQUIRED.to_vec();
    pairs.push(("ONCEWARD_KAFKA_OPTIONS_FETCH_WAIT_MAX_MS", "9"));
    let options = read(text, &pairs).expect("valid").kafka.options;
    assert_eq!((options.get("fetch.wait.max.ms"), options.get("socket.keepalive.enable")), (Some("9"), Some("true")));
}

#[test]
fn a_secret_may_stand_in_a_file_of_its_own() {
    let url = scratch("url", "postgres://bill:hunter2@db/money\n");
    let token = scratch("token", "hunter3\n");
    let text = format!("[database]\nurl_file = {:?}\n", url.display().to_string());
    let token = token.display().to_string();
    let config = read(&text, &[REQUIRED[0], REQUIRED[2], ("ONCEWARD_PROVIDER_TOKEN_FILE", &token)]).expect("valid");
    assert_eq!(config.database.url.expose(), "postgres://bill:hunter2@db/money");
    assert_eq!(config.provider.token.as_ref().map(|token| token.expose()), Some("hunter3"));
    assert_eq!(read(&text, REQUIRED).expect("the environment wins").database.url.expose(), REQUIRED[1].1);
}

#[test]
fn a_secret_given_twice_in_one_place_or_in_a_missing_file_is_a_fault() {
    faulty(read_with_required("[provider]\ntoken = \"a\"\ntoken_file = \"b\""), &["provider.token_file"]);
    faulty(read("[database]\nurl_file = \"/nowhere/at/all\"", &[REQUIRED[0], REQUIRED[2]]), &["database.url_file"]);
}

#[test]
fn a_file_that_tls_needs_and_that_cannot_be_used_is_named_with_its_key() {
    let provider = "[provider]\nca_file = \"/nowhere/ca.pem\"\nclient_cert_file = \"/nowhere/c.pem\"\n";
    let url = |url| [REQUIRED[0], REQUIRED[1], ("ONCEWARD_PROVIDER_URL", url)];
    let message = faulty(read(provider, &url("https://payments")), &["provider.ca_file", "provider.client_key_file"]);
    assert!(message.contains("/nowhere/ca.pem cannot be read"), "{message}");
    let keys = ["provider.ca_file", "provider.client_cert_file", "provider.client_key_file"];
    let message = faulty(read(provider, &url("http://payments")), &keys);
    assert!(message.contains("provider.url is not https"), "{message}");

    let half = scratch("half.pem", "-----BEGIN CERTIFICATE-----\nMIIB");
    let text = format!("[provider]\nca_file = {:?}\n", half.display().to_string());
    let message = faulty(read(&text, &url("https://payments")), &["provider.ca_file"]);
    assert!(message.contains("holds no certificate in PEM"), "{message}");

    let database = ("ONCEWARD_DATABASE_URL", "postgres://bill:hunter2@db/m?sslmode=verify-full&sslrootcert=/nowhere/ca.pem");
    let message = faulty(read("", &[REQUIRED[0], database, REQUIRED[2]]), &["database.url"]);
    assert!(message.contains("/nowhere/ca.pem cannot be read") && !message.contains("hunter"), "{message}");
}

#[test]
fn no_message_and_no_rendering_holds_a_secret() {
    let broken = "[database]\nurl = \"postgres://bill:hunter2@db/money\nx = 1";
    let message = faulty(read_with_required(broken), &["test.toml"]);
    assert!(!message.contains("hunter2") && message.contains("line 2"), "{message}");
    for url in [
        "postgres://bill:hunter2@db/money?x=hunter2",
        "hunter2",
        "postgres://bill:hunter2@db",
        "postgres://bill:hunter2@db/m?sslmode=sometimes",
        "postgres://bill:hunter2@db/m?sslmode=verify-full",
    ] {
        let message = faulty(read("", &[REQUIRED[0], ("ONCEWARD_DATABASE_URL", url), REQUIRED[2]]), &["database.url"]);
        assert!(!message.contains("hunter"), "{message}");
    }
    let mut pairs = REQUIRED.to_vec();
    pairs.push(("ONCEWARD_PROVIDER_TOKEN", "hunter3"));
    let config = read("", &pairs).expect("valid");
    for text in [config.show(), format!("{config:?}")] {
        assert!(!text.contains("hunter"), "{text}");
    }
    assert!(config.show().contains("url = \"postgres://bill:***@db:5432/money\""), "{}", config.show());
    assert!(config.show().contains("token = \"[redacted]\""));
}

#[test]
fn the_shown_configuration_is_toml_that_reads_back() {
    let config = read_with_required("[kafka.options]\nfetch.wait.max.ms = 7\n").expect("valid");
    let mut reading = Reading::default();
    reading.file("shown", &config.show());
    assert_eq!(reading.faults, []);
    reading.config.database.url = config.database.url.clone();
    assert_eq!(reading.config, config);
}

// CASES G10
#[test]
fn the_order_of_the_time_limits_is_kept_or_the_start_is_refused() {
    for (text, key) in [
        ("[provider]\ncall_timeout_ms = 10_000\n[pipeline]\ndrain_ms = 60_000", "provider.effect_deadline_ms"),
        ("[provider]\neffect_deadline_ms = 12_000", "database.idle_in_transaction_timeout_ms"),
        ("[database]\ntransaction_budget_ms = 15_000", "database.transaction_budget_ms"),
        ("[database]\nlock_timeout_ms = 5_000", "database.statement_timeout_ms"),
        ("[pipeline]\ndrain_ms = 10_000", "pipeline.drain_ms"),
        ("[kafka]\nsession_timeout_ms = 17_000", "kafka.session_timeout_ms"),
        ("[kafka]\nmax_poll_interval_ms = 20_000", "kafka.max_poll_interval_ms"),
        ("[pipeline]\ndrain_ms = 300_000", "kafka.max_poll_interval_ms"),
        ("[kafka]\ncommit_interval_ms = 20_000", "kafka.session_timeout_ms"),
        ("[database]\nconnect_timeout_ms = 20_000", "kafka.session_timeout_ms"),
        ("[provider]\nkey_life_margin_ms = 10_000", "provider.key_life_margin_ms"),
        ("[retry]\nmax_age_ms = 82_800_000", "provider.key_life_ms"),
        ("[provider]\nquery_settle_ms = 21_600_000", "retry.max_age_ms"),
        ("[retry]\nmax_age_ms = 600_000", "retry.max_age_ms"),
        ("[retry]\nbackoff_min_ms = 600_001", "retry.backoff_min_ms"),
        ("[retention]\nretention_ms = 86_399_999", "retention.retention_ms"),
        ("[kafka.options]\nheartbeat.interval.ms = 6_667", "kafka.options.heartbeat.interval.ms"),
        ("[pipeline]\nbatch_max = 10_000\nbuffer_bytes = 1_048_576", "pipeline.buffer_bytes"),
        ("[kafka]\ntopic = \"^orders\"", "kafka.topic"),
        ("[log]\nlevel = \"onceward=loud\"", "log.level"),
        ("[log]\nlevel = \"debg\"", "log.level"),
        ("[tracing]\notlp_endpoint = \"ftp://collector\"", "tracing.otlp_endpoint"),
        ("[tracing]\nsample_ratio = 1.01", "tracing.sample_ratio"),
        ("[tracing]\nsample_ratio = -1", "tracing.sample_ratio"),
    ] {
        let message = faulty(read_with_required(text), &[key]);
        assert!(message.contains("must"), "{message}");
    }
}

#[test]
fn the_chain_can_be_scaled_down_to_a_session_of_six_seconds() {
    let text = "
        [kafka]
        session_timeout_ms = 6_000
        max_poll_interval_ms = 10_000
        [pipeline]
        drain_ms = 5_000
        [database]
        lock_timeout_ms = 1_000
        statement_timeout_ms = 1_500
        idle_in_transaction_timeout_ms = 4_000
        transaction_budget_ms = 6_000
        [provider]
        call_timeout_ms = 1_500
        effect_deadline_ms = 3_500
    ";
    read_with_required(text).expect("valid");
}
