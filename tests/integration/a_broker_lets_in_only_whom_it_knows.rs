//! In production a broker asks who comes, over TLS, and lets nobody do more than an ACL says. Each of these steps has a way to fail in
//! silence: a client that trusts anybody, one that tries a wrong password a thousand times a second, a right that is missed in the middle
//! of a batch. The rights are those of `ops/acls.sh`, given by that script.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use onceward::lab::process::{exit_code, free_port};
use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{
    Authority, EngineBuilder, Message, Order, PASSWORD, Rights, SecuredKafka, Topic, World, assert_charged_once, documented_rights,
    eventually, eventually_equal,
};

const SCRAM: &str = "SCRAM-SHA-512";

fn applied(world: &World) -> i64 {
    world.database.count("SELECT count(*) FROM payment WHERE status = 'charged'")
}

/// That an engine which comes in like this settles an event.
fn assert_it_works(world: &World, engine: EngineBuilder) {
    let before = applied(world);
    let engine = engine.start();
    world.topic.send([Order::new().message()]);
    eventually_equal("the event is applied", before + 1, || applied(world));
    eventually_equal("and committed", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
}

/// A token that nobody has signed, as the broker's own validator takes it.
fn token(subject: &str, life: Duration) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let (from, until) = (now.as_secs_f64() - 1.0, (now + life).as_secs_f64());
    let part = |text: &str| BASE64_URL_SAFE_NO_PAD.encode(text);
    format!("{}.{}.", part(r#"{"alg":"none"}"#), part(&format!(r#"{{"sub":"{subject}","iat":{from:.3},"exp":{until:.3}}}"#)))
}

/// Not as seldom as librdkafka does by itself about a topic that it was refused.
fn asks_again(engine: EngineBuilder) -> EngineBuilder {
    engine.set("kafka.options.topic.metadata.refresh.interval.ms", "500")
}

/// What `/ready` says of the assignment.
fn why_not_ready(engine: &crate::support::Engine) -> String {
    engine.get("/ready").map(|(_, body)| body).unwrap_or_default()
}

/// How often the engine has been told of an error by its Kafka client.
fn client_errors(engine: &crate::support::Engine) -> f64 {
    engine.metric("onceward_client_errors_total", &[])
}

#[test]
fn under_exactly_the_documented_acls_every_command_does_its_work() {
    let kafka = SecuredKafka::shared();
    let world = kafka.world(3);
    let letters = Topic::at(&kafka.plain, &format!("{}.dlq", world.topic.name()), 1, &[]);
    kafka.grant(&world, "run", "billing");
    let as_billing = || kafka.engine(&world, SCRAM, "billing").set("held.dead_letters", true);
    // Each by a user who may do nothing else.
    let command = |arguments: &[&str]| {
        kafka.grant(&world, arguments[0], arguments[0]);
        let admin = format!("127.0.0.1:{}", free_port().expect("a free port"));
        let output = kafka.engine(&world, SCRAM, arguments[0]).set("admin.listen", admin).run_to_end(arguments);
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        (exit_code(output.status), said)
    };

    let first = as_billing().start();
    let (orders, rejected) = (Order::some(30), Order::new());
    world.provider.script([Rule::for_order(rejected.order_id, Act::status(422))]);
    world.topic.send(orders.iter().chain([&rejected]).map(Order::message));
    eventually_equal("every event is settled and committed", 0, || world.topic.lag(&world.group));
    eventually_equal("the rejected one is a dead letter", 1, || Topic::records_at(&kafka.plain, letters.name()).len());

    let second = as_billing().start();
    eventually("the second has its share", || !second.owned().is_empty() && first.owned().is_disjoint(&second.owned()));
    let more = Order::some(30);
    world.topic.send(more.iter().map(Order::message));
    eventually_equal("both settle", 0, || world.topic.lag(&world.group));
    assert!(second.terminate().success());
    eventually_equal("the first has all again", 3, || first.owned().len());
    assert_charged_once(&world.provider, orders.iter().chain(&more));
    let log = first.log();
    assert!(!log.contains("not asked") && !log.contains("authorization"), "it misses no right: {log}");
    assert!(!log.contains(PASSWORD));

    let (code, said) = command(&["produce", "--count", "5"]);
    assert_eq!(code, 0, "{said}");
    eventually_equal("what was produced is settled", 0, || world.topic.lag(&world.group));
    for arguments in [&["offsets", "show"][..], &["status"], &["audit"]] {
        let (code, said) = command(arguments);
        assert_eq!(code, 0, "{said}");
    }
    let (_, said) = command(&["check"]);
    assert!(!said.contains("NOT ASKED"), "{said}");
    let line = said.lines().find(|line| line.starts_with("kafka_tls")).expect("it is asked");
    assert!(line.contains("ok") && line.contains("sasl_ssl"), "{line}");
    assert!(first.terminate().success());
}

/// A command, a right that `ops/acls.sh` gives it, and what is said without it.
const MISSED: [(&str, &str, &str); 15] = [
    ("run", "Read --topic", "needs Read on the topic"),
    ("run", "Read --group", "needs Read on the consumer group"),
    ("run", "DescribeConfigs --topic", "needs DescribeConfigs on it"),
    ("run", "Write --topic .dlq", "Write where it writes"),
    ("check", "Read --topic", "needs Read on the topic"),
    ("check", "DescribeConfigs --topic", "needs DescribeConfigs on it"),
    ("check", "Describe --group", "or Describe where it only asks"),
    ("check", "DescribeConfigs --cluster", "needs DescribeConfigs on it"),
    ("audit", "Read --topic", "needs Read on the topic"),
    ("audit", "Describe --group", "or Describe where it only asks"),
    ("offsets", "Describe --topic", "Describe where it only asks"),
    ("offsets", "Describe --group", "or Describe where it only asks"),
    ("status", "Describe --topic", "Describe where it only asks"),
    ("status", "Describe --group", "or Describe where it only asks"),
    ("produce", "Write --topic", "Write where it writes"),
];

/// Looked at only where there is another broker to replicate to, and here is one; a refusal is judged in `src/certificate/topic.rs`.
const OF_SEVERAL_BROKERS: [&str; 2] = ["Describe --topic __consumer_offsets", "DescribeConfigs --topic __consumer_offsets"];

#[test]
fn without_any_one_of_the_documented_acls_something_is_missing_and_it_is_named() {
    let kafka = SecuredKafka::shared();
    let world = kafka.world(1);
    let _letters = Topic::at(&kafka.plain, &format!("{}.dlq", world.topic.name()), 1, &[]);
    let rights = Rights::at(&kafka.plain);
    // What is told of the group's offsets needs somebody to have committed some.
    kafka.grant(&world, "run", "billing");
    assert_it_works(&world, kafka.engine(&world, SCRAM, "billing"));

    let mut tried = 0;
    for command in ["run", "check", "audit", "offsets", "status", "produce"] {
        // Nobody else is called that, so the rights on what all share are theirs alone.
        let user = format!("{command}-of-{}", world.topic.name());
        let file = kafka.file(&format!("{user}.token"), &token(&user, Duration::from_secs(3_600)));
        let engine = || asks_again(kafka.unnamed(&world, "OAUTHBEARER")).set("kafka.oauth_token_file", file.as_str());
        let documented = documented_rights(command, world.topic.name(), &world.group);
        documented.iter().for_each(|right| rights.give(&user, right));
        for right in &documented {
            let name = right.name.replace(&world.group, "").replace(world.topic.name(), "").replace("kafka-cluster", "");
            let shown = format!("{} {} {name}", right.operation, right.kind).trim().to_owned();
            if OF_SEVERAL_BROKERS.contains(&shown.as_str()) {
                continue;
            }
            let missed = MISSED.iter().find(|(of, what, _)| *of == command && *what == shown);
            let (_, _, says) = missed.unwrap_or_else(|| panic!("{command}: what is missed without {shown}?"));
            tried += 1;
            rights.take(&user, right);
            let what = format!("{command} without {shown} says: {says}");
            if command == "run" {
                let engine = engine().set("held.dead_letters", true).launch();
                world.topic.send([Message::new("no event")]);
                eventually(&what, || engine.log().contains(says));
                rights.give(&user, right);
                eventually("it goes on when the right is given", || engine.is_ready() && world.topic.lag(&world.group) == 0);
                assert!(engine.terminate().success());
            } else {
                let arguments: &[&str] = match command {
                    "offsets" => &["offsets", "show"],
                    "produce" => &["produce", "--count", "1"],
                    other => &[other],
                };
                eventually(&what, || {
                    let admin = format!("127.0.0.1:{}", free_port().expect("a free port"));
                    let output = engine().set("admin.listen", admin).run_to_end(arguments);
                    [output.stdout, output.stderr].iter().any(|said| String::from_utf8_lossy(said).contains(says))
                });
                rights.give(&user, right);
            }
        }
    }
    assert_eq!(tried, MISSED.len(), "each is a right that is documented");
}

#[test]
fn a_right_that_is_missing_is_named_and_when_it_is_given_the_engine_goes_on() {
    let kafka = SecuredKafka::shared();
    let world = kafka.world(1);
    let order = Order::new();
    world.topic.send([order.message()]);
    let engine = asks_again(kafka.engine(&world, SCRAM, "billing")).launch();
    eventually("the log names the right to ask for settings", || engine.log().contains("ops/acls.sh"));
    eventually("readiness names the right", || why_not_ready(&engine).contains("needs Read on the"));
    kafka.grant(&world, "run", "billing");
    eventually("it is ready", || engine.is_ready());
    eventually_equal("the event is applied", 1, || applied(&world));
    assert_charged_once(&world.provider, &[order]);

    // So does the certificate.
    let checked = kafka.engine(&world, SCRAM, "check").run_to_end(&["check"]);
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert_eq!(exit_code(checked.status), 1, "{said}");
    let topic = said.lines().find(|line| line.starts_with("topic ")).expect("it is asked");
    assert!(topic.contains("needs Read on the topic") && topic.contains("ops/acls.sh"), "{topic}");
}

#[test]
fn a_broker_that_nobody_we_trust_vouches_for_hears_nothing_of_us() {
    let kafka = SecuredKafka::shared();
    let world = kafka.world(1);
    kafka.grant(&world, "run", "billing");
    let stranger = kafka.file("stranger.pem", &Authority::new().pem());
    let engine = kafka.engine(&world, SCRAM, "billing");
    for (wrong, what) in [
        (engine.clone().set("kafka.options.ssl.ca.location", stranger), "an authority that we do not know"),
        // The certificate is for 127.0.0.1.
        (
            engine.clone().set("kafka.brokers", kafka.sasl.replace("127.0.0.1", "localhost")),
            "a name that is not in the certificate",
        ),
    ] {
        let checked = wrong.run_to_end(&["check"]);
        let said = String::from_utf8_lossy(&checked.stdout).into_owned();
        assert_eq!(exit_code(checked.status), 1, "{what}: {said}");
        let line = said.lines().find(|line| line.starts_with("brokers ")).expect("it is asked");
        assert!(line.contains("certificate verify failed") && line.contains("see ssl.ca.location"), "{what}: {line}");
    }
    let stranger = kafka.file("stranger.pem", &Authority::new().pem());
    let refusing = engine.clone().set("kafka.options.ssl.ca.location", stranger).launch();
    eventually("readiness says what to look at", || why_not_ready(&refusing).contains("see ssl.ca.location"));
    assert!(refusing.is_live(), "a restart would help nobody");
    assert!(refusing.terminate().success());

    // Whoever turns it off is told so.
    let off = engine
        .set("kafka.brokers", kafka.sasl.replace("127.0.0.1", "0.0.0.0"))
        .set("kafka.options.ssl.endpoint.identification.algorithm", "none");
    let said = String::from_utf8_lossy(&off.run_to_end(&["check"]).stdout).into_owned();
    let line = said.lines().find(|line| line.starts_with("kafka_tls")).expect("it is asked");
    assert!(line.contains("FAILED") && line.contains("ssl.endpoint.identification.algorithm"), "{line}");
}

#[test]
fn a_wrong_password_is_told_and_tried_seldom_and_the_right_one_is_taken_from_its_file() {
    let kafka = SecuredKafka::shared();
    let world = kafka.world(1);
    kafka.grant(&world, "run", "billing");
    let file = kafka.file("password", "a wrong one\n");
    let with_a_file = || {
        kafka
            .unnamed(&world, SCRAM)
            .set("kafka.options.sasl.username", "billing")
            .set("kafka.options.sasl.password.file", file.as_str())
    };
    let engine = with_a_file().launch();
    eventually("readiness names the option", || {
        why_not_ready(&engine).contains("see sasl.mechanism, sasl.username and the password")
    });
    assert!(engine.is_live(), "a restart would help nobody");
    assert!(!engine.log().contains("a wrong one"));
    kafka.file("password", &format!("{PASSWORD}\n"));
    eventually("it is ready", || engine.is_ready());
    assert!(engine.terminate().success());

    // Now the client that joins the group meets it first, and gets the right one while it lives.
    kafka.file("password", "a wrong one\n");
    let engine = with_a_file().launch();
    eventually("the client is refused more than once", || client_errors(&engine) > 1.0);
    assert!(why_not_ready(&engine).contains("see sasl.mechanism, sasl.username and the password"), "{}", why_not_ready(&engine));
    kafka.file("password", &format!("{PASSWORD}\n"));
    eventually("it is ready", || engine.is_ready());
    assert!(engine.log().contains("the password of Kafka was replaced in its file"));
    assert!(client_errors(&engine) < 50.0, "it has tried without end: {}", client_errors(&engine));
    world.topic.send([Order::new().message()]);
    eventually_equal("the event is applied", 1, || applied(&world));
    assert!(engine.terminate().success());

    let shown = with_a_file().run_to_end(&["check", "--show-config"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("sasl.password.file") && !shown.contains(PASSWORD), "{shown}");
}

#[test]
fn every_way_to_say_who_one_is_works() {
    let kafka = SecuredKafka::shared();
    let world = kafka.world(1);
    kafka.grant(&world, "run", "billing");
    for mechanism in ["PLAIN", "SCRAM-SHA-256"] {
        assert_it_works(&world, kafka.engine(&world, mechanism, "billing"));
    }
    let identity = kafka.authority.sign("billing");
    let [certificate, key] =
        [("certificate.pem", &identity.certificate), ("key.pem", &identity.key)].map(|(name, content)| kafka.file(name, content));
    let by_certificate = |certificate: &str, key: &str| {
        world
            .engine()
            .set("kafka.brokers", kafka.mutual.as_str())
            .set("kafka.options.security.protocol", "ssl")
            .set("kafka.options.ssl.ca.location", kafka.authority_file.as_str())
            .set("kafka.options.ssl.certificate.location", certificate)
            .set("kafka.options.ssl.key.location", key)
    };
    assert_it_works(&world, by_certificate(&certificate, &key));

    let stranger = Authority::new().sign("billing");
    let [certificate, key] = [("stranger-certificate.pem", &stranger.certificate), ("stranger-key.pem", &stranger.key)]
        .map(|(name, content)| kafka.file(name, content));
    let refused = by_certificate(&certificate, &key).launch();
    eventually("readiness says what to look at", || why_not_ready(&refused).contains("see ssl.ca.location"));
}

// CASES A16
#[test]
fn a_token_is_renewed_from_its_file_by_whoever_waits_for_records() {
    let kafka = SecuredKafka::shared();
    let world = kafka.world(1);
    kafka.grant(&world, "run", "billing");
    kafka.grant(&world, "offsets", "billing");
    let life = Duration::from_secs(8);
    let began = SystemTime::now();
    let file = kafka.file("token", &token("billing", life));
    let with_a_token = || kafka.unnamed(&world, "OAUTHBEARER").set("kafka.oauth_token_file", file.as_str());
    let engine = with_a_token().start();
    let mut sent = 0;
    // The broker ends a connection whose token has expired.
    while began.elapsed().expect("time goes on") < life * 2 {
        kafka.file("token", &token("billing", life));
        world.topic.send([Order::new().message()]);
        sent += 1;
        eventually_equal("the event is applied", sent, || applied(&world));
        eventually_equal("and committed", 0, || world.topic.lag(&world.group));
    }
    assert!(engine.is_ready());
    // A client that is asked and dropped, polled by nobody.
    let shown = with_a_token().run_to_end(&["offsets", "show"]);
    assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
    let log = engine.log();
    assert!(engine.terminate().success());
    assert!(!log.contains("no token available"), "{log}");

    // One that is not renewed is told, and the next one is taken.
    let file = kafka.file("old-token", &token("billing", Duration::ZERO));
    let engine = with_a_token().set("kafka.oauth_token_file", file.as_str()).launch();
    eventually("readiness names the file", || why_not_ready(&engine).contains("kafka.oauth_token_file"));
    kafka.file("old-token", &token("billing", Duration::from_secs(600)));
    eventually("it is ready", || engine.is_ready());
}
