//! In production nothing lets anybody in who cannot say who they are, and nobody may do more than their work. What each side takes alone is
//! shown elsewhere; here the service has to live with all of it at once, and with nothing but what is documented.

use url::Url;

use crate::support::{
    Authority, Database, Folder, Message, Order, SecuredKafka, Topic, World, assert_charged_once, eventually, eventually_equal,
};
use crate::the_database_is_met_over_tls::{tls_server, url};

const GRANTS: &str = include_str!("../../ops/grants.sql");

#[test]
fn with_tls_names_and_documented_rights_on_both_sides_the_service_does_all_of_its_work() {
    let (kafka, authority, folder) = (SecuredKafka::shared(), Authority::new(), Folder::new());
    let (_server, database) = Database::in_a_server(&tls_server(&authority, "hostssl all all all scram-sha-256"));
    database.execute(GRANTS);
    database.execute("ALTER ROLE onceward_service PASSWORD 'secret'");
    let verified = format!("sslmode=verify-full&sslrootcert={}", folder.put("authority.pem", &authority.pem()));
    let mut service = Url::parse(&url(database.url(), "localhost", &verified)).expect("a URL");
    service.set_username("onceward_service").and_then(|()| service.set_password(Some("secret"))).expect("a user");
    let world = World::at(&kafka.plain, database, 3);
    let letters = Topic::at(&kafka.plain, &format!("{}.dlq", world.topic.name()), 1, &[]);
    kafka.grant(&world, "run", "billing");
    let engine = || {
        let engine = kafka.engine(&world, "SCRAM-SHA-512", "billing").set("held.dead_letters", true);
        engine.set("database.url", service.as_str()).start()
    };

    let first = engine();
    let orders = Order::some(40);
    world.topic.send(orders[..20].iter().map(Order::message).chain([Message::new("no event")]));
    eventually_equal("every record is settled and committed", 0, || world.topic.lag(&world.group));
    eventually_equal("what is no event is a dead letter", 1, || Topic::records_at(&kafka.plain, letters.name()).len());
    let second = engine();
    eventually("the second has its share", || !second.owned().is_empty() && first.owned().is_disjoint(&second.owned()));
    world.topic.send(orders[20..].iter().map(Order::message));
    eventually_equal("both settle", 0, || world.topic.lag(&world.group));
    assert_charged_once(&world.provider, &orders);
    let others =
        "SELECT count(*) FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE usename = 'onceward_service' AND NOT ssl";
    assert_eq!(world.database.count(others), 0, "nothing is said in plain text");
    assert!(second.terminate().success() && first.terminate().success());
}
