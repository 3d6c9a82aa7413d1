//! Passwords, tokens and certificates are replaced while the service runs, by programs that write files in two steps or take one away
//! before the next is there.

use std::fs;
use std::time::{Duration, Instant};

use onceward::config::Config;
use onceward::lab::postgres::Options;
use onceward::provider::Client;
use serde_json::json;
use url::Url;
use uuid::Uuid;

use crate::support::{
    Authority, Folder, Order, TlsFront, World, assert_charged_once, block_on, eventually, eventually_equal, stub,
};

const THROW_OUT: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'engine'";

#[test]
fn a_new_password_of_the_database_is_used_for_the_next_connection() {
    let (server, world) = World::with_a_server(&Options { fsync: false, ..Options::default() }, 3);
    let folder = Folder::new();
    let url = |password: &str| {
        let mut url = Url::parse(world.database.url()).expect("a URL");
        url.set_username("engine").and_then(|()| url.set_password(Some(password))).expect("a user");
        url.to_string()
    };
    world.database.execute("CREATE ROLE engine SUPERUSER LOGIN PASSWORD 'first'");
    let file = folder.put("url", &url("first"));
    let engine = world.engine().unset("database.url").set("database.url_file", file.as_str()).start();
    let mut orders = Vec::new();
    let mut settle_some = |why: &str| {
        let new = Order::some(5);
        world.topic.send(new.iter().map(Order::message));
        orders.extend(new);
        eventually_equal(why, 0, || world.topic.lag(&world.group));
        assert_charged_once(&world.provider, &orders);
    };
    settle_some("the first password is good");

    world.database.execute("ALTER ROLE engine PASSWORD 'second'");
    folder.put("url", &url("second"));
    world.database.execute(THROW_OUT);
    settle_some("the second one is used");

    for broken in ["", "postgres://engine:sec"] {
        folder.put("url", broken);
        world.database.execute(THROW_OUT);
        settle_some("half of a file is not used");
    }
    fs::remove_file(folder.path("url")).expect("it is there");
    world.database.execute(THROW_OUT);
    settle_some("a file that is gone is not missed");
    assert!(engine.log().contains("what was there before stays in use"), "it is said");

    world.database.execute("ALTER ROLE engine PASSWORD 'third'");
    world.database.execute(THROW_OUT);
    eventually("the old password is of no use any more", || !engine.is_ready());
    folder.put("url", &url("third"));
    settle_some("the third one is used as soon as it is there");
    assert!(engine.terminate().success());
    drop(server);
}

#[test]
fn the_next_calls_to_the_provider_have_the_new_token_and_the_new_certificates() {
    let (old, new, folder, provider) = (Authority::new(), Authority::new(), Folder::new(), stub());
    let (before, after) = (TlsFront::before(&provider.url(), &old.sign("localhost"), Some(&old)), &new);
    let mut config = Config::default();
    config.provider.url = Some(before.url().parse().expect("a URL"));
    config.provider.ca_file = Some(folder.put("ca.pem", &old.pem()).into());
    let shown = |authority: &Authority| {
        let identity = authority.sign("onceward");
        (folder.put("client.pem", &identity.certificate), folder.put("client.key", &identity.key))
    };
    let (certificate, key) = shown(&old);
    config.provider.client_cert_file = Some(certificate.into());
    config.provider.client_key_file = Some(key.into());
    let token = folder.put("token", "first\n");
    let loaded = Config::load(None, [("ONCEWARD_PROVIDER_TOKEN_FILE".into(), token.into())], &[]).expect("valid");
    config.provider.token = loaded.provider.token;
    let client = Client::new(&config.provider.settings().expect("an address")).expect("a client");
    let charge = || {
        block_on(client.charge(Uuid::now_v7(), b"{\"orderId\":7,\"amount\":10.00,\"currency\":\"EUR\"}".to_vec(), false, None))
            .class()
    };
    let last = || before.tokens().last().cloned();
    assert_eq!((charge(), last()), ("charged", Some("first".to_owned())));

    // A key that is not the certificate's, and no token: as they are in the middle of a rotation.
    folder.put("client.key", &new.sign("onceward").key);
    folder.put("token", "");
    let end = Instant::now() + Duration::from_secs(3);
    eventually("longer than between two looks", || {
        assert_eq!((charge(), last()), ("charged", Some("first".to_owned())), "what was there before stays in use");
        Instant::now() > end
    });
    shown(&old);
    folder.put("token", "second\n");
    eventually_equal("the new token is sent", ("charged", Some("second".to_owned())), || (charge(), last()));

    folder.put("ca.pem", &after.pem());
    eventually_equal("the provider's old issuer is none any more", "not_reached", charge);
    folder.put("ca.pem", &format!("{}{}", after.pem(), old.pem()));
    eventually_equal("both are", "charged", charge);
}

#[test]
fn the_admin_port_believes_the_new_token_and_no_longer_the_old_one() {
    let (world, folder) = (World::with_partitions(1), Folder::new());
    let [first, second] = ["the-first-token-of-1", "the-second-token-of-2"];
    let engine = world.engine().set("admin.token_file", folder.put("token", first)).start();
    let told = |token: &str| {
        let body = json!({ "actor": "ann", "reason": "who may?" });
        engine.post("/api/held/17/replay", token, &body).0
    };
    assert_eq!((told(first), told(second)), (404, 401), "there is no such held event");
    // Cut short, as it is in the middle of a write: it could be guessed.
    folder.put("token", &second[..4]);
    eventually("it is looked at and not used", || {
        assert_eq!((told(first), told(&second[..4])), (404, 401));
        engine.log().contains("what was there before stays in use")
    });
    folder.put("token", second);
    eventually_equal("only the new one opens", (401, 404), || (told(first), told(second)));
    let log = engine.log();
    assert!(!log.contains(first) && !log.contains(&second[..4]), "{log}");
    assert!(engine.terminate().success());
}
