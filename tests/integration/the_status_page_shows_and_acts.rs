//! A person looks at the status page at night and decides: what it shows must be the whole group's state, what it asks for must happen, and
//! a record's content, which anybody who can produce may write, must never act in that person's browser.

use onceward::lab::provider_stub::{Act, Reply, Rule};
use serde_json::{Value, json};

use crate::support::{
    ANSWER, Browser, Engine, Message, Order, World, assert_charged_once, assert_the_books_agree, eventually, eventually_equal,
    request,
};

const TOKEN: &str = "what-only-operators-know";

const HELD: &str = "SELECT reason || ' ' || state FROM held_event ORDER BY id";

fn engine(world: &World) -> Engine {
    world.engine().set("admin.token", TOKEN).set("retry.max_attempts", 1).start()
}

fn page(engine: &Engine) -> Browser {
    Browser::open(&format!("http://{}/", engine.address()))
}

/// As a person does: the token is typed into the page.
fn sign_in(browser: &Browser, token: &str) {
    browser.opens("#token");
    browser.fill("#key-token", token);
    browser.click("#key button[type=submit]");
}

/// Opens an action's dialog.
fn open(browser: &Browser, rows: &str, action: &str) {
    browser.opens(&format!("#{rows} [data-action={action}]"));
}

/// Says who and why, and does it.
fn confirm(browser: &Browser) {
    browser.fill("#ask-reason", "seen with the bank");
    browser.fill("#ask-actor", "ann");
    browser.click("#ask-do");
}

/// One held event of this state, and the page with the token in it.
fn held(script: Act, state: &str) -> (World, Engine, Browser, Order) {
    let (world, order) = (World::with_partitions(1), Order::new());
    world.provider.script([Rule::always(script)]);
    world.topic.send([order.message()]);
    let engine = engine(&world);
    eventually_equal("held", vec![state.to_owned()], || world.database.column(HELD));
    world.provider.clear_script();
    let browser = page(&engine);
    sign_in(&browser, TOKEN);
    browser.misses("dialog[open]");
    (world, engine, browser, order)
}

fn overview(engine: &Engine) -> Value {
    let (status, body) = eventually("an overview", || engine.get("/api/overview"));
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

#[test]
fn a_held_event_is_replayed_from_the_page() {
    let (world, _engine, browser, order) = held(Act::status(422), "rejected parked");
    browser.sees("#held", "rejected");
    open(&browser, "held", "replay");
    confirm(&browser);
    eventually_equal("applied", vec!["rejected applied".to_owned()], || world.database.column(HELD));
    assert_eq!(world.database.column("SELECT actor || ': ' || note FROM held_event"), ["ann: seen with the bank"]);
    browser.sees("#held-empty", "Nothing is held");
    assert_the_books_agree(&world, &world.provider, [&order]);
}

#[test]
fn a_held_event_is_discarded_from_the_page() {
    let (world, _engine, browser, order) = held(Act::status(422), "rejected parked");
    open(&browser, "held", "discard");
    browser.sees("#ask-about", "neither charged nor recorded");
    confirm(&browser);
    eventually_equal("discarded", vec!["rejected discarded".to_owned()], || world.database.column(HELD));
    browser.sees("#held-empty", "Nothing is held");
    assert!(world.provider.ledger().iter().all(|entry| entry.charge_id.is_none()), "{} was never charged", order.order_id);
}

#[test]
fn an_unknown_payment_stands_first_and_is_resolved_from_the_page() {
    let (world, _engine, browser, order) = held(Act::Close { charge: true, reset: true }, "unknown parked");
    browser.sees("#alerts", "1 unknown payment");
    world.topic.send([Message::new("no event")]);
    browser.sees("#held", "undecodable");
    browser.sees("#held tr:first-child", "unknown");
    let charge = world.provider.ledger()[0].charge_id.clone().expect("it was charged");

    open(&browser, "held", "resolve");
    confirm(&browser);
    browser.sees("#ask-said", "a resolve says either");
    browser.click("#ask-charged");
    browser.fill("#ask-charge", &charge);
    browser.click("#ask-do");
    eventually("applied", || world.database.column(HELD).contains(&"unknown applied".to_owned()));
    assert_charged_once(&world.provider, [&order]);
    assert_eq!(world.database.column("SELECT provider_charge_id FROM payment"), [charge]);
    eventually("the alarm ends", || browser.text("#alerts").is_some_and(|text| !text.contains("unknown")));
}

#[test]
fn a_partition_is_paused_and_resumed_from_the_page() {
    let world = World::with_partitions(1);
    let engine = engine(&world);
    let browser = page(&engine);
    sign_in(&browser, TOKEN);
    open(&browser, "partitions", "pause");
    confirm(&browser);
    browser.sees("#partitions", "paused");
    browser.sees("#partitions", "seen with the bank");
    browser.sees("#alerts", "1 partition paused by an operator");
    browser.sees("#decisions", "pause partition 0");
    let order = Order::new();
    world.topic.send([order.message()]);
    eventually("the page shows that it waits", || overview(&engine)["lag"] == 1);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 0);

    open(&browser, "partitions", "resume");
    confirm(&browser);
    browser.sees("#partitions", "running");
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_the_books_agree(&world, &world.provider, [&order]);
}

#[test]
fn a_record_is_held_from_the_page_and_the_next_one_goes_on() {
    let world = World::with_partitions(1);
    let engine = engine(&world);
    let browser = page(&engine);
    sign_in(&browser, TOKEN);
    let [bad, good] = [Order::new(), Order::new()];
    open(&browser, "partitions", "pause");
    confirm(&browser);
    browser.sees("#partitions", "paused");
    world.topic.send([bad.message(), good.message()]);

    open(&browser, "partitions", "hold");
    browser.fill("#ask-offset", "0");
    confirm(&browser);
    browser.misses("dialog[open]");
    open(&browser, "partitions", "resume");
    confirm(&browser);
    eventually_equal("held", 1, || {
        world.database.count("SELECT count(*) FROM held_event WHERE state = 'parked' AND source_offset = 0")
    });
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    browser.sees("#held", "seen with the bank");
    assert_charged_once(&world.provider, [&good]);
    assert_eq!(world.database.column("SELECT order_id FROM payment"), [good.order_id.to_string()]);
}

#[test]
fn what_a_record_says_is_shown_as_text_and_runs_nothing() {
    const ATTACK: &str =
        "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script><svg onload='window.hurt=1'>\"'`${window.hurt=1}";
    let world = World::with_partitions(1);
    let refusal = Act::Reply(Reply { status: 422, body: Some(json!({ "error": ATTACK }).to_string()), ..Reply::default() });
    let order = Order::new();
    world.provider.script([Rule::always(refusal)]);
    world.topic.send([
        Message::new(ATTACK).key(ATTACK).header(ATTACK, Some(ATTACK.as_bytes())),
        Message::new(format!("{{\"eventId\":\"{ATTACK}\"}}").replace('\'', "")).key("k"),
        order.message().key(ATTACK),
    ]);
    let engine = engine(&world);
    eventually_equal("held", 3, || world.database.count("SELECT count(*) FROM held_event"));
    let browser = page(&engine);
    sign_in(&browser, TOKEN);
    browser.sees("#held", "<script>");
    let elements = || browser.run("return document.querySelectorAll('img, iframe, script, svg[onload], [onerror]').length");
    for id in world.database.column("SELECT id FROM held_event ORDER BY id") {
        browser.opens(&format!("#held tr[data-key='{id}'] [data-action=show]"));
        browser.sees("#show-title", &id);
        eventually("its payload is read", || browser.text("#show-payload").is_some_and(|text| !text.is_empty()));
        assert_eq!(elements(), 1, "the page's own script, and nothing that a record has brought");
        browser.click("#show-close");
    }
    let first = world.database.text("SELECT id FROM held_event WHERE source_offset = 0");
    browser.opens(&format!("#held tr[data-key='{first}'] [data-action=show]"));
    browser.sees("#show-payload", "<img src=x onerror=");
    browser.sees("#show-fields", "header <img");
    assert_eq!(browser.run("return window.hurt === undefined"), true);
    // And were it made by mistake: the policy lets no text become an element, and no script run that is not the page's.
    let tried = browser.run("try { document.body.innerHTML = '<p>x'; return 'made'; } catch (error) { return error.name; }");
    assert_eq!(tried, "TypeError");
    let inline = browser.run(
        "try { const button = document.createElement('button'); button.setAttribute('onclick', 'window.hurt = 1'); \
         document.body.append(button); button.click(); } catch {} return window.hurt === undefined",
    );
    assert_eq!(inline, true);
}

#[test]
fn without_the_token_nothing_can_be_done_and_no_record_is_seen() {
    let (world, engine, browser, _) = held(Act::status(422), "rejected parked");
    let id = world.database.text("SELECT id FROM held_event");
    let path = format!("/api/held/{id}/discard");
    let body = json!({ "actor": "eve", "reason": "because" });

    // In the page: it asks for the token, and takes no other.
    browser.run("sessionStorage.clear()");
    browser.sees("#held-note", "with the token only");
    open(&browser, "held", "discard");
    browser.sees("#key-title", "Token");
    browser.fill("#key-token", "another-token-of-nobody");
    browser.click("#key button[type=submit]");
    browser.sees("#key-said", "not the token");
    assert_eq!(browser.run("return sessionStorage.getItem('onceward-token')"), Value::Null);

    // Beside it: no token, another one, one that a browser would send by itself, and a body that a form could send.
    let token = format!("Bearer {TOKEN}");
    let ask = |method: &str, path: &str, headers: &[(&str, &str)]| {
        request(ANSWER, engine.address(), method, path, headers, &body.to_string()).expect("an answer")
    };
    let json_body = ("Content-Type", "application/json");
    assert_eq!(ask("POST", &path, &[json_body]).0, 401);
    assert_eq!(ask("POST", &path, &[json_body, ("Authorization", "Bearer what-only-operators-guess")]).0, 401);
    assert_eq!(ask("POST", &path, &[json_body, ("Cookie", &format!("token={TOKEN}"))]).0, 401);
    assert_eq!(ask("POST", &path, &[("Content-Type", "text/plain"), ("Authorization", &token)]).0, 415);
    assert_eq!(ask("POST", &path, &[json_body, ("Authorization", &token), ("Origin", "http://evil.example")]).0, 403);
    for path in ["/api/partitions/0/pause", "/api/partitions/0/resume", "/api/partitions/0/hold"] {
        assert_eq!(ask("POST", path, &[json_body]).0, 401, "{path}");
    }
    assert_eq!(ask("GET", &path, &[("Authorization", &token)]).0, 404, "a look never acts");
    assert_eq!(ask("GET", &format!("/api/held/{id}"), &[]).0, 401);
    assert_eq!(ask("GET", "/api/decisions", &[]).0, 401);
    let (_, list) = ask("GET", "/api/held", &[]);
    assert!(list.contains("rejected") && !list.contains("payload") && !list.contains("error") && !list.contains("key"), "{list}");
    assert_eq!(world.database.count("SELECT count(*) FROM held_event WHERE wanted IS NOT NULL OR actor IS NOT NULL"), 0);
    assert_eq!(world.database.column(HELD), ["rejected parked"]);

    // Who says neither who nor why is not heard, token or not.
    for wrong in
        [json!({ "actor": "ann" }), json!({ "actor": " ", "reason": "r" }), json!({ "actor": "ann", "reason": "", "x": 1 })]
    {
        assert_eq!(engine.post(&path, TOKEN, &wrong).0, 400, "{wrong}");
    }
    assert_eq!(world.database.column(HELD), ["rejected parked"]);
    assert_eq!(engine.post(&path, TOKEN, &body).0, 200);
    eventually_equal("discarded", vec!["rejected discarded".to_owned()], || world.database.column(HELD));
    assert_eq!(engine.post(&path, TOKEN, &body), (409, json!({ "error": "it is discarded" }).to_string()));
}

/// The first overview may take as long as the broker; whoever is faster must not lose the token.
#[test]
fn a_token_that_is_typed_before_anything_is_seen_is_kept() {
    let (_world, engine, browser, _) = held(Act::status(422), "rejected parked");
    browser.run("sessionStorage.clear()");
    browser.chrome("Network.enable", json!({}));
    browser.chrome("Network.setBlockedURLs", json!({ "urls": ["*/api/overview*"] }));
    browser.go(&format!("http://{}/", engine.address()));
    browser.sees("#link", "not reachable");
    sign_in(&browser, TOKEN);
    browser.misses("dialog[open]");
    browser.chrome("Network.setBlockedURLs", json!({ "urls": [] }));
    browser.sees("#token", "Token in use");
    browser.sees("#held", "422");
}

#[test]
fn a_token_that_cannot_be_tried_is_not_called_wrong() {
    let (world, _engine, browser, _) = held(Act::status(422), "rejected parked");
    browser.sees("#token", "Token in use");
    let lock = world.database.session();
    lock.rows("BEGIN; LOCK TABLE held_event IN ACCESS EXCLUSIVE MODE");
    sign_in(&browser, "another-token-of-nobody");
    browser.sees("#key-said", "database");
    lock.rows("ROLLBACK");
    browser.click("#key button[type=submit]");
    browser.sees("#key-said", "not the token");
    browser.click("#key-cancel");
    browser.sees("#token", "Token in use");
}

#[test]
fn without_a_configured_token_actions_are_off_and_say_which_key_to_set() {
    let world = World::with_partitions(1);
    let engine = world.engine().start();
    let (status, body) = engine.post("/api/partitions/0/pause", TOKEN, &json!({ "actor": "ann", "reason": "r" }));
    assert_eq!(status, 403);
    assert!(body.contains("admin.token_file"), "{body}");
    assert_eq!(overview(&engine)["process"]["actions"], false);
}

#[test]
fn the_page_says_so_when_the_process_is_gone() {
    let world = World::with_partitions(1);
    let engine = engine(&world);
    let browser = page(&engine);
    browser.sees("#link", "ready");
    browser.sees("#partitions", "running");
    engine.kill();
    browser.sees("#link", "not reachable");
    browser.sees("#alerts", "The process cannot be reached since");
    browser.sees("#partitions", "running");
}

#[test]
fn one_process_shows_the_partitions_of_all_and_the_command_line_needs_none() {
    let world = World::new();
    let orders = Order::some(3);
    let [one, other] = [engine(&world), engine(&world)];
    eventually("both own some", || {
        !one.owned().is_empty() && !other.owned().is_empty() && one.owned().len() + other.owned().len() == 3
    });
    world.topic.send((0..).zip(&orders).map(|(partition, order)| order.message().partition(partition)));
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    let seen = eventually("every partition with its owner, its lag and its offset in Kafka", || {
        let seen = overview(&one);
        let rows = seen["partitions"].as_array().expect("rows").clone();
        let whole = |row: &Value| row["lag"] == 0 && row["settled"] == 1 && row["committed"] == 1 && row["state"] == "running";
        (rows.len() == 3 && rows.iter().all(whole)).then_some(rows)
    });
    let owners: std::collections::BTreeSet<&str> = seen.iter().filter_map(|row| row["owner"].as_str()).collect();
    assert_eq!(owners.len(), 2, "{seen:?}");
    let here: std::collections::BTreeSet<i64> =
        seen.iter().filter(|row| row["here"] == true).filter_map(|row| row["partition"].as_i64()).collect();
    assert_eq!(here, one.owned());
    assert!(seen.iter().all(|row| row["in_flight"].is_null() != (row["here"] == true)), "of others that is not known: {seen:?}");
    drop([one, other]);

    let output = world.onceward(&["status", "--format", "json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).expect("one line of JSON");
    assert_eq!((&told["lag"], &told["held"]["unknown"]), (&json!(0), &json!(0)));
    assert_eq!(told["partitions"].as_array().map(Vec::len), Some(3));
    let output = world.onceward(&["status"]);
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(text.contains("lag 0, 0 held") && text.contains("PostgreSQL"), "{text}");

    let nobody = world.engine().set("kafka.brokers", "127.0.0.1:1").run_to_end(&["status"]);
    let text = String::from_utf8(nobody.stdout).expect("text");
    assert_eq!(nobody.status.code(), Some(1));
    assert!(text.contains("kafka      does not answer") && text.contains(&world.group), "{text}");
}

#[test]
fn a_database_that_is_silent_makes_no_viewer_wait_and_what_was_seen_stays() {
    let world = World::with_partitions(1);
    let engine = engine(&world);
    eventually("it is seen", || overview(&engine)["partitions"][0]["epoch"] == 1);
    let lock = world.database.session();
    lock.rows("BEGIN; LOCK TABLE held_event IN ACCESS EXCLUSIVE MODE");
    let seen = eventually("the database does not answer", || {
        let asked = std::time::Instant::now();
        let seen = overview(&engine);
        assert!(asked.elapsed() < ANSWER / 2, "nobody waits for it: {:?}", asked.elapsed());
        seen["database"]["error"].is_string().then_some(seen)
    });
    assert_eq!(seen["partitions"][0]["epoch"], 1, "what was seen last");
    lock.rows("ROLLBACK");
    eventually("it is asked again", || overview(&engine)["database"]["error"].is_null());
}
