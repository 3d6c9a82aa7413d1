//! A service that runs as a superuser can do to the payments whatever somebody makes it do; one that lacks a right meets that in the
//! middle of a batch, after the charge.

use std::process::Output;

use onceward::lab::postgres::{self, Options, Postgres};
use onceward::lab::provider_stub::{Act, Rule};
use onceward::store::{Store, conditions};
use url::Url;

use crate::support::{
    EngineBuilder, Message, Order, World, assert_charged_once, block_on, eventually, eventually_equal, start_without_cleaning,
};

const GRANTS: &str = include_str!("../../ops/grants.sql");
const ROLES: [&str; 4] = ["onceward_owner", "onceward_service", "onceward_reader", "onceward_operator"];
/// What the reader may read.
const READ: [&str; 9] = [
    "processed_event",
    "payment",
    "payment_attempt",
    "attempt_batch",
    "consumed_partition",
    "held_event",
    "horizon_claim",
    "operator_action",
    "retention",
];
const READS: [&[&str]; 7] = [
    &["status"],
    &["actions"],
    &["audit"],
    &["held", "list"],
    &["held", "show", "1"],
    &["offsets", "show"],
    &["retention", "status"],
];
const DAY_MS: i64 = 86_400_000;
const HELD: &str = "SELECT reason || ' ' || state FROM held_event ORDER BY id";

/// A database of which everybody has what is documented and nothing else.
struct Granted {
    world: World,
    _server: Postgres,
}

impl Granted {
    fn new() -> Self {
        let (server, world) = World::with_a_server(&Options { fsync: false, ..Options::default() }, 1);
        world.database.execute(GRANTS);
        world.database.execute(GRANTS); // as after the next migration
        for role in ROLES {
            world.database.execute(&format!("ALTER ROLE {role} PASSWORD 'secret'"));
        }
        Self { world, _server: server }
    }

    fn url(&self, role: &str) -> String {
        let mut url = Url::parse(self.world.database.url()).expect("a URL");
        url.set_username(role).and_then(|()| url.set_password(Some("secret"))).expect("a user");
        url.to_string()
    }

    fn engine(&self, role: &str) -> EngineBuilder {
        let engine = self.world.engine().set("retention.retention_ms", 7 * DAY_MS).set("retention.replay_horizon_ms", DAY_MS);
        engine.set("database.url", self.url(role))
    }

    fn run(&self, role: &str, arguments: &[&str]) -> Output {
        self.engine(role).run_to_end(arguments)
    }

    fn must(&self, role: &str, arguments: &[&str]) -> String {
        let output = self.run(role, arguments);
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{role} {arguments:?}: {text}");
        text
    }

    fn held(&self, decision: &str, reason: &str) {
        self.must("onceward_operator", &["held", decision, "--reason", reason, "--because", "it was looked at", "--actor", "ann"]);
    }

    fn settled(&self) {
        eventually_equal("every record is settled and committed", 0, || self.world.topic.lag(&self.world.group));
    }

    /// What the role may write, as `INSERT payment`.
    fn writes(&self, role: &str) -> Vec<String> {
        self.world.database.column(&format!(
            "SELECT privilege_type || ' ' || table_name FROM information_schema.role_table_grants
             WHERE grantee = '{role}' AND table_name !~ '^processed_event' AND privilege_type <> 'SELECT' ORDER BY 1"
        ))
    }
}

#[test]
fn a_whole_life_of_the_service_needs_what_is_granted_and_all_of_it() {
    let granted = Granted::new();
    let world = &granted.world;
    world.topic.alter("retention.ms", "-1");
    let noon = (world.database.count("SELECT (extract(epoch FROM now()) * 1000)::bigint") / DAY_MS - 20) * DAY_MS + DAY_MS / 2;
    let (old, current) = (Order::new().made_at(noon), Order::some(3));
    // Twice nobody knows, the third time it is found.
    world.provider.script([Rule::for_order(current[0].order_id, Act::Close { charge: true, reset: true }).times(2)]);
    world.topic.send([old.old_message(), Message::new("no event")].into_iter().chain(current.iter().map(Order::message)));
    let running = start_without_cleaning(world, granted.engine("onceward_service"));
    granted.settled();
    eventually_equal(
        "it is tried again until it is known",
        vec!["undecodable parked".to_owned(), "unknown applied".to_owned()],
        || world.database.column(HELD),
    );
    assert_charged_once(&world.provider, current.iter().chain([&old]));
    let noted = "SELECT count(*) FROM consumed_partition WHERE remember_ms IS NOT NULL AND safe_time > now() - interval '1 hour'";
    eventually_equal("what is settled is noted", 1, || world.database.count(noted));

    // A day is forgotten, and what nothing tells of any more is replayed and found to be another's.
    for arguments in READS {
        granted.must("onceward_reader", arguments);
    }
    assert!(granted.must("onceward_service", &["retention", "run"]).contains("is gone"));
    world.database.execute(&format!("DELETE FROM payment WHERE event_id = '{}'", old.event_id));
    world.topic.send([old.old_message()]);
    granted.settled();
    world.database.execute(&format!(
        "INSERT INTO payment (event_id, order_id, customer_id, amount, currency, status, attempts)
         VALUES ('{}', 1, 7, 99, 'EUR', 'charged', 1)",
        old.event_id
    ));
    granted.held("replay", "beyond_horizon");
    eventually("it is compared", || world.database.column(HELD).contains(&"conflict parked".to_owned()));
    granted.held("discard", "undecodable");
    eventually("it is given up", || world.database.column(HELD).contains(&"undecodable discarded".to_owned()));
    assert!(running.terminate().success());
    world.topic.send([Order::new().message()]);
    granted
        .must("onceward_operator", &["offsets", "skip", "--partition", "0", "--to", "7", "--reason", "a test", "--actor", "ann"]);
    let by = ["--reason", "a test", "--actor", "ann"];
    granted.must("onceward_operator", &[&["offsets", "hold", "0", "9"], &by[..]].concat());
    granted.must("onceward_operator", &[&["partition", "pause", "0"], &by[..]].concat());
    granted.must("onceward_operator", &[&["partition", "resume", "0"], &by[..]].concat());
    let running = granted.engine("onceward_service").start();
    granted.settled();
    assert!(running.terminate().success());
    granted.must("onceward_owner", &["migrate"]);

    let unused = || {
        let mut granted = granted.writes("onceward_service");
        granted.retain(|write| {
            let (verb, table) = write.split_once(' ').expect("two words");
            let counter = format!("n_tup_{}", verb[..3].to_lowercase());
            world.database.count(&format!("SELECT {counter} FROM pg_stat_user_tables WHERE relname = '{table}'")) == 0
        });
        granted
    };
    assert!(granted.writes("onceward_service").len() > 10);
    eventually_equal("whatever is granted was done", Vec::<String>::new(), unused);
    for table in READ {
        world.database.execute(&format!("REVOKE SELECT ON {table} FROM onceward_reader"));
        let is_refused = |arguments: &&[&str]| {
            String::from_utf8_lossy(&granted.run("onceward_reader", arguments).stderr).contains("permission denied")
        };
        assert!(READS.iter().any(is_refused), "nobody reads {table}");
        world.database.execute(&format!("GRANT SELECT ON {table} TO onceward_reader"));
    }
}

#[test]
fn a_right_that_is_missing_is_named_before_anything_is_read() {
    let granted = Granted::new();
    let database = &granted.world.database;
    let store = Store::connect(&granted.engine("onceward_service").load().database.settings(), 1).expect("a good URL");
    let missing = || {
        block_on(async {
            let mut session = store.control.get().await.expect("it answers");
            conditions::missing_privileges(&mut session).await.expect("it may ask")
        })
    };
    assert_eq!(missing(), [""; 0]);
    for right in granted.writes("onceward_service").into_iter().chain(["CREATE SCHEMA public".to_owned()]) {
        let (verb, on) = right.split_once(' ').expect("two words");
        database.execute(&format!("REVOKE {verb} ON {on} FROM onceward_service"));
        assert!(missing().iter().any(|missing| missing.contains(verb)), "{right}: {:?}", missing());
        database.execute(&format!("GRANT {verb} ON {on} TO onceward_service"));
    }
    database.execute("ALTER TABLE processed_event OWNER TO onceward_owner");
    let refused = granted.run("onceward_service", &["run"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("our role lacks") && said.contains("to own processed_event"), "{said}");
}

#[test]
fn nobody_may_do_anothers_part() {
    let granted = Granted::new();
    granted.world.database.execute("CREATE ROLE stranger LOGIN PASSWORD 'secret'");
    let may = |role: &str, sql: &str| match postgres::query(&granted.url(role), sql) {
        Ok(_) => true,
        Err(postgres::PostgresError::Sql(_, error)) if error.code().is_some_and(|code| code.code() == "42501") => false,
        Err(error) => panic!("{role}: {error}"),
    };
    for table in READ {
        assert!(may("onceward_reader", &format!("TABLE {table}")), "{table}");
        assert!(!may("stranger", &format!("TABLE {table}")), "{table}");
        for write in [format!("DELETE FROM {table}"), format!("TRUNCATE {table}")] {
            assert!(!may("onceward_reader", &write) && !may("onceward_operator", &write), "{write}");
        }
        assert!(!may("onceward_reader", &format!("INSERT INTO {table} DEFAULT VALUES")), "{table}");
    }
    for never in [
        "DELETE FROM payment",
        "UPDATE payment SET amount = 1",
        "TRUNCATE payment",
        "DELETE FROM held_event",
        "DROP TABLE retention",
    ] {
        assert!(!may("onceward_service", never), "{never}");
    }
    for never in ["UPDATE held_event SET payload = ''", "UPDATE consumed_partition SET next_offset = 0", "CREATE TABLE mine ()"] {
        assert!(!may("onceward_operator", never), "{never}");
    }
}
