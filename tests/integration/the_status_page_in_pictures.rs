//! The pictures of the status page in the documents: of a group that has met some of everything, made by `scripts/pictures`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{env, fs, thread};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use onceward::lab::process::{self, Signal};
use onceward::lab::provider_stub::{Act, Reply, Rule};
use serde_json::json;

use crate::support::{Browser, Engine, Message, Order, RaisedAtTheEnd, Topic, World, eventually};

const TOKEN: &str = "what-only-operators-know";
const THEMES: [&str; 2] = ["light", "dark"];
const WIDTHS: [(&str, u32); 2] = [("wide", 1280), ("narrow", 390)];
/// A document with larger ones is slow to read.
const MOST_BYTES: usize = 200 << 10;

#[test]
fn the_pictures_of_the_status_page_are_there_in_both_themes_wide_and_narrow() {
    if env::var_os("ONCEWARD_TEST_PICTURES").is_some() {
        make_pictures();
    }
    for (theme, (name, width)) in THEMES.iter().flat_map(|theme| WIDTHS.map(|width| (theme, width))) {
        let png = fs::read(picture(theme, name)).expect("a picture");
        let stands_in_it = u32::from_be_bytes(png[16..20].try_into().expect("four bytes"));
        assert_eq!((&png[1..4], stands_in_it), (&b"PNG"[..], width), "{theme} {name}");
        assert!(png.len() < MOST_BYTES, "{theme} {name}: {} bytes", png.len());
    }
}

fn picture(theme: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/status-page-{theme}-{name}.png"))
}

fn make_pictures() {
    let group = "billing-order-confirmed".to_owned();
    let world = World { topic: Topic::create("orders.confirmed", 6), group, ..World::new() };
    let engines = [start(&world), start(&world)];
    eventually("both own some", || engines.iter().map(|engine| engine.owned().len()).sum::<usize>() == 6);
    let end = AtomicBool::new(false);
    thread::scope(|scope| {
        let _raised = RaisedAtTheEnd(&end);
        scope.spawn(|| produce(&world, &end));
        hold_some(&world);
        let body = json!({ "actor": "ann", "reason": "the bank is closed until 06:00, ticket 4711" });
        assert_eq!(engines[0].post("/api/partitions/4/pause", TOKEN, &body).0, 200);
        shoot(&world, &engines[0]);
    });
}

fn start(world: &World) -> Engine {
    let week = 7 * 86_400_000;
    world.engine().set("admin.token", TOKEN).set("retry.max_attempts", 1).set("retention.replay_horizon_ms", week).start()
}

/// A steady stream, and now and then the same event again.
fn produce(world: &World, end: &AtomicBool) {
    let mut turn = 0;
    while !end.load(Ordering::Acquire) {
        turn += 1;
        let prices = [("64.90", "EUR"), ("3480", "JPY"), ("18.75", "USD")];
        let priced = |(order, (amount, currency)): (Order, (&str, &str))| order.amount(amount).currency(currency);
        let orders: Vec<Order> = Order::some(8 + turn % 5).into_iter().zip(prices.into_iter().cycle()).map(priced).collect();
        world.topic.send(orders.iter().map(Order::message));
        if turn % 7 == 0 {
            world.topic.send(orders.iter().map(Order::message));
        }
        thread::sleep(Duration::from_millis(40)); // its pace
    }
}

fn hold_some(world: &World) {
    let [unknown, lost, rejected, behind] = [Order::new(), Order::new(), Order::new(), Order::new()];
    let refusal = r#"{"error":{"code":"amount_too_large","message":"more than this merchant may charge"}}"#.to_owned();
    world.provider.script([
        Rule::for_order(unknown.order_id, Act::Close { charge: true, reset: true }),
        Rule::for_order(lost.order_id, Act::Close { charge: false, reset: false }),
        Rule::for_order(rejected.order_id, Act::Reply(Reply { status: 422, body: Some(refusal), ..Reply::default() })),
    ]);
    world.topic.send([
        unknown.message().key("customer-8812"),
        behind.message().key("customer-8812"),
        lost.message().key("customer-104"),
        rejected.message().key("customer-7"),
        Message::new("<order><id>42</id></order>").key("legacy-shop"),
        Message::new("").key("customer-19"),
    ]);
    eventually("they are held", || {
        world.database.count("SELECT count(*) FROM held_event WHERE state IN ('parked', 'waiting')") >= 6
    });
}

/// Whose machine the pictures are made on is nobody's business.
const NAMELESS: &str = r"
    const names = new Map(), here = ' (this one)';
    for (const place of [document.getElementById('process'), ...document.querySelectorAll('#partitions td.owner')]) {
        const owner = place.textContent.replace(here, '');
        if (!names.has(owner)) names.set(owner, 'billing-' + names.size + ':17');
        place.textContent = names.get(owner) + (place.textContent.endsWith(here) ? here : '');
    }";

fn shoot(world: &World, engine: &Engine) {
    let owners = "SELECT count(*) FROM consumed_partition WHERE owner LIKE '%:%'";
    eventually("each has its owner again", || world.database.count(owners) == 6);
    let browser = Browser::open(&format!("http://{}/", engine.address()));
    browser.opens("#token");
    browser.fill("#key-token", TOKEN);
    browser.click("#key button[type=submit]");
    browser.misses("dialog[open]");
    world.database.execute("ANALYZE"); // the number of claims is the database's own guess
    browser.chrome("Input.dispatchMouseEvent", json!({ "type": "mouseMoved", "x": 0, "y": 0 }));
    eventually("there is a history to draw", || browser.run("return samples.length").as_u64() >= Some(24));
    browser.run("poll = () => {}");
    thread::sleep(Duration::from_secs(2)); // what is on its way arrives
    browser.run(NAMELESS);
    for theme in THEMES {
        let features =
            json!([{ "name": "prefers-color-scheme", "value": theme }, { "name": "prefers-reduced-motion", "value": "reduce" }]);
        browser.chrome("Emulation.setEmulatedMedia", json!({ "features": features }));
        for (name, width) in WIDTHS {
            let size = |height: u64| json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500 });
            browser.chrome("Emulation.setDeviceMetricsOverride", size(800));
            let height = browser.run("return document.documentElement.scrollHeight").as_u64().expect("a height");
            browser.chrome("Emulation.setDeviceMetricsOverride", size(height));
            let shot = browser.chrome("Page.captureScreenshot", json!({ "format": "png" }));
            let png = BASE64_STANDARD.decode(shot["data"].as_str().expect("a picture")).expect("as the protocol says");
            fs::write(picture(theme, name), smaller(&png)).expect("a file");
        }
    }
}

/// With fewer colours, which nobody sees.
fn smaller(png: &[u8]) -> Vec<u8> {
    let mut command = Command::new("pngquant");
    command.args(["--strip", "128", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = process::spawn(command, Signal::Kill).expect("pngquant is there");
    let mut stdin = child.stdin.take().expect("a pipe");
    thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(png).expect("it reads all of it first"));
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", output.status);
        output.stdout
    })
}
