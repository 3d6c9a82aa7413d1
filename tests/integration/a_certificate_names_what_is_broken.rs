//! Every set-up that holds today is broken one day by somebody who means well: an index for a report, a trigger for a log, a topic that is
//! compacted to save space. Nobody notices until an event was charged twice, or never. `onceward check` names the one condition that does
//! not hold, and calls no other one broken; what nobody would notice later, `onceward run` refuses before it reads anything.

mod in_kafka;
mod in_the_database;

use std::collections::BTreeMap;
use std::process::Output;

use onceward::lab::process::{exit_code, free_port};
use onceward::lab::provider_stub::{self, ProviderStub};
use serde_json::Value;

use crate::support::{Database, EngineBuilder, Order, Topic, World, eventually_equal, unique_name};

/// A topic whose records are gone before their ids are forgotten.
const RETENTION: [(&str, &str); 2] = [("retention.ms", "432000000"), ("segment.ms", "86400000")];

/// One way to break a set-up.
struct Break {
    /// The condition that it breaks.
    condition: &'static str,
    /// What the finding must say.
    says: &'static str,
    /// How: the engine is the one to check with.
    how: fn(&World, EngineBuilder) -> EngineBuilder,
}

/// What a check has said.
struct Checked {
    code: u8,
    findings: BTreeMap<String, Value>,
}

impl Checked {
    fn of(output: &Output) -> Self {
        let text = String::from_utf8_lossy(&output.stdout);
        let findings = text.lines().map(|line| {
            let finding: Value = serde_json::from_str(line).expect("a line is an object");
            (finding["condition"].as_str().expect("a name").to_owned(), finding)
        });
        Self { code: exit_code(output.status), findings: findings.collect() }
    }

    fn with(&self, verdict: &str) -> Vec<&str> {
        let those = self.findings.iter().filter(|(_, finding)| finding["verdict"] == verdict);
        those.map(|(name, _)| name.as_str()).collect()
    }

    fn finding(&self, condition: &str) -> &Value {
        &self.findings[condition]
    }

    /// That this one alone does not hold, and that every other was asked.
    fn assert_only(&self, condition: &str, says: &str) {
        assert_eq!((self.with("failed"), self.with("not_asked")), (vec![condition], vec![]), "{says}: {:#?}", self.findings);
        assert_eq!(self.code, 1, "{condition}");
        let (found, todo) = (&self.finding(condition)["found"], &self.finding(condition)["todo"]);
        assert!(format!("{found} {todo}").contains(says), "{condition} says nothing of `{says}`: {found} {todo}");
        assert!(todo.as_str().is_some_and(|todo| !todo.is_empty()), "{condition} does not say what to do: {found}");
    }

    fn assert_good(&self) {
        assert_eq!((self.with("failed"), self.with("not_asked")), (vec![], vec![]), "{:#?}", self.findings);
        assert_eq!((self.code, self.findings.len() > 35), (0, true));
    }
}

fn check(engine: EngineBuilder) -> Checked {
    Checked::of(&engine.run_to_end(&["check", "--format", "json"]))
}

/// Whose admin port nobody else has.
fn engine(world: &World) -> EngineBuilder {
    world.engine().set("admin.listen", format!("127.0.0.1:{}", free_port().expect("a free port")))
}

/// A set-up that holds, in which partitions 0 and 1 of three are settled up to their ends.
fn good() -> World {
    let name = unique_name();
    good_in(Database::migrated(&name), &name)
}

fn good_in(database: Database, name: &str) -> World {
    let world = World {
        topic: Topic::configured(name, 3, &RETENTION),
        database,
        provider: ProviderStub::start(provider_stub::Options::default()).expect("a provider"),
        group: format!("group-{name}"),
    };
    let running = world.engine().start();
    world.topic.send([0, 1].map(|partition| Order::new().message().partition(partition)));
    eventually_equal("two events are settled", 0, || world.topic.lag(&world.group));
    assert!(running.terminate().success());
    world
}

/// That it does not read, if the condition is a blocking one: nobody takes a partition over, nobody is called.
fn assert_run_refuses(world: &World, engine: EngineBuilder, condition: &str) {
    let epochs = || world.database.column("SELECT epoch FROM consumed_partition ORDER BY partition");
    let before = (epochs(), world.provider.calls().posts);
    let output = engine.run_to_end(&["run"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(exit_code(output.status), 1, "{said}");
    assert!(said.contains(condition) && said.contains("nothing is read"), "{condition}: {said}");
    assert_eq!((epochs(), world.provider.calls().posts), before, "{condition}");
}

#[test]
fn a_provider_that_does_not_answer_or_can_be_listened_to_is_named() {
    let world = good();
    check(engine(&world).provider("http://127.0.0.1:1")).assert_only("provider", "see provider.url");
    let anywhere = world.provider.url().replace("127.0.0.1", "0.0.0.0");
    check(engine(&world).provider(&anywhere)).assert_only("provider_tls", "plain text");
    check(engine(&world).without_provider()).assert_good();
}

#[test]
fn a_good_set_up_has_its_certificate_and_asking_for_it_changes_nothing() {
    let world = good();
    let posts = world.provider.calls().posts;
    let epochs = || world.database.column("SELECT epoch FROM consumed_partition ORDER BY partition");
    let before = (epochs(), world.topic.committed(&world.group));
    check(engine(&world)).assert_good();
    assert_eq!((epochs(), world.topic.committed(&world.group)), before);
    let running = engine(&world).start();
    check(engine(&world)).assert_good();
    assert!(running.terminate().success());
    assert_eq!(world.provider.calls().posts, posts, "nobody was charged");

    let text = engine(&world).run_to_end(&["check"]);
    let said = String::from_utf8_lossy(&text.stdout).into_owned();
    assert_eq!(exit_code(text.status), 0, "{said}");
    assert!(
        said.lines().all(|line| line.split_whitespace().nth(1).is_some_and(|verdict| ["ok", "-"].contains(&verdict))),
        "{said}"
    );
}

#[test]
fn a_set_up_that_has_never_run_is_good_too() {
    let name = unique_name();
    let world = World {
        topic: Topic::configured(&name, 3, &RETENTION),
        database: Database::migrated(&name),
        provider: ProviderStub::start(provider_stub::Options::default()).expect("a provider"),
        group: format!("group-{name}"),
    };
    let checked = check(engine(&world));
    checked.assert_good();
    assert_eq!(checked.finding("witness")["verdict"], "does_not_apply", "nothing was settled that could be compared");
    assert_eq!(world.database.count("SELECT count(*) FROM consumed_partition"), 0);
    assert_eq!(world.provider.calls().posts, 0);
}
