//! Asynchronous connections are made in plain text whatever `sslmode` says, and nobody notices (diesel_async#54); or TLS is spoken with
//! whoever answers.

use std::time::Duration;

use onceward::config::Secret;
use onceward::lab::postgres::{Options, Postgres};
use onceward::store::{DbError, ErrorClass, PooledSession, Settings, Store, TimeLimits, TransactionError};
use rcgen::{PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519};
use url::Url;

use crate::support::{Authority, Folder, Order, World, assert_charged_once, block_on, eventually, eventually_equal, server};

const SECOND: Duration = Duration::from_secs(1);
const LIMITS: TimeLimits = TimeLimits {
    lock: SECOND,
    statement: Duration::from_secs(20),
    idle_in_transaction: Duration::from_secs(20),
    budget: Duration::from_secs(20),
};

/// A server that speaks TLS as `localhost`; everybody but the superuser must.
pub fn tls_server(authority: &Authority, hba: &str) -> Options {
    let identity = authority.sign("localhost");
    let hba = format!("host all postgres all scram-sha-256\n{hba}\n");
    Options {
        fsync: false,
        settings: vec![("ssl".to_owned(), "on".to_owned())],
        files: [
            ("ssl_cert_file", identity.certificate),
            ("ssl_key_file", identity.key),
            ("ssl_ca_file", authority.pem()),
            ("hba_file", hba),
        ]
        .map(|(name, content)| (name.to_owned(), content))
        .to_vec(),
        ..Options::default()
    }
}

/// The database `postgres` of a server, asked for by this name and with these words.
pub fn url(server: &str, host: &str, words: &str) -> String {
    let mut url = Url::parse(server).expect("a URL");
    url.set_host(Some(host)).expect("a host");
    url.set_query(Some(words).filter(|words| !words.is_empty()));
    url.to_string()
}

fn connect(url: &str) -> Result<PooledSession, DbError> {
    let settings = Settings {
        url: Secret::new(url.to_owned()),
        connect_timeout: Duration::from_secs(5),
        pool_wait: Duration::from_secs(5),
        limits: LIMITS,
    };
    block_on(async { Ok(Store::connect(&settings, 1)?.control.get().await?) })
}

/// What the server says of this connection.
fn is_encrypted(session: &mut PooledSession) -> bool {
    let assert_that =
        |what: &str| format!("DO $$ BEGIN ASSERT (SELECT {what} FROM pg_stat_ssl WHERE pid = pg_backend_pid()); END $$");
    let [yes, no] = ["ssl", "NOT ssl"].map(|what| block_on(run(session, &assert_that(what))).is_ok());
    assert!(yes != no, "the server knows");
    yes
}

async fn run(session: &mut PooledSession, sql: &str) -> Result<(), DbError> {
    use diesel_async::SimpleAsyncConnection as _;
    let done = session.batch_execute(sql).await;
    done.map_err(|error| session.db_error("test", error))
}

// CASES D06
#[test]
fn the_right_name_of_the_right_issuer_is_met_and_nobody_else() {
    let (authority, stranger, folder) = (Authority::new(), Authority::new(), Folder::new());
    let server = Postgres::start(&tls_server(&authority, "")).expect("a server");
    let (ours, theirs) = (folder.put("ours.pem", &authority.pem()), folder.put("theirs.pem", &stranger.pem()));
    for (host, words) in [
        ("localhost", format!("sslmode=verify-full&sslrootcert={ours}")),
        ("localhost", format!("sslmode=verify-full&sslrootcert={ours}&hostaddr=127.0.0.1")),
        ("127.0.0.1", format!("sslmode=verify-ca&sslrootcert={ours}")),
        ("127.0.0.1", format!("sslmode=require&sslrootcert={ours}")),
        ("127.0.0.1", "sslmode=require".to_owned()),
        ("127.0.0.1", "sslmode=prefer".to_owned()),
        ("127.0.0.1", String::new()),
    ] {
        let mut session =
            connect(&url(&server.url("postgres"), host, &words)).unwrap_or_else(|error| panic!("{host} {words}: {error}"));
        assert!(is_encrypted(&mut session), "{host} {words}");
    }
    let mut plain = connect(&url(&server.url("postgres"), "127.0.0.1", "sslmode=disable")).expect("the superuser may");
    assert!(!is_encrypted(&mut plain));
    for (host, words, says) in [
        ("127.0.0.1", format!("sslmode=verify-full&sslrootcert={ours}"), "not valid for name"),
        ("localhost", format!("sslmode=verify-full&sslrootcert={theirs}"), "UnknownIssuer"),
        ("localhost", format!("sslmode=verify-ca&sslrootcert={theirs}"), "UnknownIssuer"),
        ("localhost", format!("sslmode=require&sslrootcert={theirs}"), "UnknownIssuer"),
    ] {
        let error = connect(&url(&server.url("postgres"), host, &words)).map(|_| ()).expect_err("not whom we mean");
        assert!(error.class() == ErrorClass::Connection && error.to_string().contains(says), "{host} {words}: {error}");
    }
    let of_the_machine =
        connect(&url(&server.url("postgres"), "localhost", "sslrootcert=system")).map(|_| ()).expect_err("not ours");
    let says = of_the_machine.to_string();
    assert!(says.contains("UnknownIssuer") || says.contains("no root certificates"), "{says}");
}

// CASES D06
#[test]
fn a_server_without_tls_is_refused_where_tls_is_wanted() {
    let (authority, folder) = (Authority::new(), Folder::new());
    let ours = folder.put("ours.pem", &authority.pem());
    let plain = server("ONCEWARD_TEST_DATABASE_URL");
    for words in [
        "sslmode=require".to_owned(),
        format!("sslmode=verify-ca&sslrootcert={ours}"),
        format!("sslmode=verify-full&sslrootcert={ours}"),
    ] {
        let error = connect(&url(&plain, "127.0.0.1", &words)).map(|_| ()).expect_err("no TLS");
        assert!(error.class() == ErrorClass::Connection && error.to_string().contains("has no TLS"), "{words}: {error}");
    }
    for words in ["", "sslmode=allow", "sslmode=prefer", "sslmode=disable"] {
        let mut session = connect(&url(&plain, "127.0.0.1", words)).unwrap_or_else(|error| panic!("{words}: {error}"));
        assert!(!is_encrypted(&mut session), "{words}");
    }
}

#[test]
fn a_client_is_known_by_its_certificate() {
    let (authority, stranger, folder) = (Authority::new(), Authority::new(), Folder::new());
    let server =
        Postgres::start(&tls_server(&authority, "hostssl all bill all scram-sha-256 clientcert=verify-full")).expect("a server");
    onceward::lab::postgres::query(&server.url("postgres"), "CREATE ROLE bill LOGIN PASSWORD 'secret'").expect("a role");
    let ca = folder.put("ca.pem", &authority.pem());
    let words = |name: &str, identity: &crate::support::Identity| {
        let certificate = folder.put(&format!("{name}.pem"), &identity.certificate);
        let key = folder.put(&format!("{name}.key"), &identity.key);
        format!("sslmode=verify-full&sslrootcert={ca}&sslcert={certificate}&sslkey={key}")
    };
    let bill = |words: &str| {
        let mut url = Url::parse(&url(&server.url("postgres"), "localhost", words)).expect("a URL");
        url.set_username("bill").and_then(|()| url.set_password(Some("secret"))).expect("a user");
        connect(url.as_str())
    };
    assert!(is_encrypted(&mut bill(&words("bill", &authority.sign("bill"))).expect("his own certificate")));
    bill(&words("mallory", &authority.sign("mallory"))).map(|_| ()).expect_err("the name of somebody else");
    bill(&words("stranger", &stranger.sign("bill"))).map(|_| ()).expect_err("the issuer is nobody's");
    bill(&format!("sslmode=verify-full&sslrootcert={ca}")).map(|_| ()).expect_err("none at all");
}

/// The server itself measures the hash: a wrong one is a wrong password.
#[test]
fn a_password_is_bound_to_the_connection_where_the_certificate_allows_it() {
    for (algorithm, binds) in [(&PKCS_ECDSA_P256_SHA256, true), (&PKCS_ECDSA_P384_SHA384, true), (&PKCS_ED25519, false)] {
        let authority = Authority::signing_with(algorithm);
        let server = Postgres::start(&tls_server(&authority, "")).expect("a server");
        for (binding, works) in [("prefer", true), ("disable", true), ("require", binds)] {
            let words = format!("sslmode=require&channel_binding={binding}");
            let met = connect(&url(&server.url("postgres"), "localhost", &words)).map(|_| ());
            assert_eq!(met.is_ok(), works, "{algorithm:?} {binding}: {met:?}");
        }
    }
}

// CASES D07
#[test]
fn what_the_server_says_is_heard_through_tls_and_its_end_at_once() {
    let authority = Authority::new();
    let server = Postgres::start(&tls_server(&authority, "")).expect("a server");
    let mut session = connect(&url(&server.url("postgres"), "localhost", "sslmode=require")).expect("it answers");
    for (sql, state) in [("SELECT 1 / 0", "22012"), ("SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(20)", "57P01")] {
        let error = block_on(session.transaction("test", &LIMITS, async |s| {
            use diesel_async::SimpleAsyncConnection as _;
            let done = s.batch_execute(sql).await;
            done.map_err(|error| s.db_error("test", error))
        }));
        let Err(TransactionError::Body(error)) = error else { panic!("{error:?}") };
        assert_eq!(error.sqlstate(), Some(state), "{error}");
    }
}

#[test]
fn an_engine_does_all_of_its_work_over_tls() {
    let (authority, folder) = (Authority::new(), Folder::new());
    // The engine's role is let in over TLS alone.
    let (server, world) = World::with_a_server(&tls_server(&authority, "hostssl all engine all scram-sha-256"), 3);
    world.database.execute("CREATE ROLE engine SUPERUSER LOGIN PASSWORD 'secret'");
    let ca = folder.put("ca.pem", &authority.pem());
    let mut address =
        Url::parse(&url(world.database.url(), "localhost", &format!("sslmode=verify-full&sslrootcert={ca}"))).expect("a URL");
    address.set_username("engine").and_then(|()| address.set_password(Some("secret"))).expect("a user");
    let engine = world.engine().set("database.url", address.as_str());

    let running = engine.clone().start();
    let orders = Order::some(30);
    world.topic.send(orders.iter().map(Order::message));
    eventually_equal("all are settled", 0, || world.topic.lag(&world.group));
    assert_charged_once(&world.provider, &orders);
    let ours = "FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'onceward'";
    assert!(world.database.count(&format!("SELECT count(*) {ours}")) > 0);
    assert_eq!(world.database.count(&format!("SELECT count(*) {ours} AND NOT ssl")), 0);
    for arguments in [&["migrate"][..], &["audit"], &["held", "list"], &["offsets", "show"], &["retention", "status"]] {
        let output = engine.clone().run_to_end(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(running.terminate().success());

    let wrong = folder.put("wrong.pem", &Authority::new().pem());
    let waiting = engine.set("database.url", address.as_str().replace(&ca, &wrong)).launch();
    eventually("it waits, and says why", || waiting.get("/ready").is_some_and(|(_, body)| body.contains("UnknownIssuer")));
    drop((waiting, server));
}
