//! A rule names a metric by its name alone: renamed, it stays silent for ever, and nobody notices until the night in which it should have
//! spoken. And whoever is woken needs to know what to do. Here every rule and every panel is held to the metrics that there are, every alert
//! to its cases and its runbook, and a real run to the series that the alerts read.

mod catalogue;
mod promql;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use onceward::lab::provider_stub::{Act, Rule as Script};
use serde::Deserialize;
use serde_json::Value;

use self::catalogue::{Catalogue, TARGET};
use self::promql::Query;
use crate::support::{Engine, Message, Order, World, eventually, eventually_equal, stub};

/// `ops/alerts.yaml`.
#[derive(Deserialize)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    rules: Vec<Alert>,
}

#[derive(Deserialize)]
struct Alert {
    alert: String,
    expr: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

/// `ops/alerts_test.yaml`.
#[derive(Deserialize)]
struct Cases {
    tests: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    input_series: Vec<Input>,
    alert_rule_test: Vec<Expected>,
}

#[derive(Deserialize)]
struct Input {
    series: String,
}

#[derive(Deserialize)]
struct Expected {
    alertname: String,
    exp_alerts: Vec<Value>,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn alerts() -> Vec<Alert> {
    let rules: Rules = serde_yaml_ng::from_str(&read("ops/alerts.yaml")).expect("rules");
    rules.groups.into_iter().flat_map(|group| group.rules).collect()
}

fn cases() -> Vec<Case> {
    let cases: Cases = serde_yaml_ng::from_str(&read("ops/alerts_test.yaml")).expect("cases");
    cases.tests
}

fn metrics() -> Catalogue {
    Catalogue::read(&read("docs/METRICS.md"))
}

/// The panels of the dashboard, rows left out.
fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&read("ops/grafana/onceward.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    panels.iter().filter(|panel| panel["type"] != "row").cloned().collect()
}

/// The queries of a panel, with a value for each of Grafana's variables that stand for a time.
fn queries(panel: &Value) -> Vec<(String, &str)> {
    let targets = panel["targets"].as_array().expect("targets");
    let text = |target: &Value, field: &str| target[field].as_str().unwrap_or_default().replace("$__rate_interval", "5m");
    targets.iter().map(|target| (text(target, "expr"), target["legendFormat"].as_str().unwrap_or_default())).collect()
}

/// The labels that a template shows, each behind this mark.
fn shown<'a>(template: &'a str, mark: &str) -> Vec<&'a str> {
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    template.split(mark).skip(1).map(|rest| &rest[..rest.find(|c: char| !is_name(c)).unwrap_or(rest.len())]).collect()
}

#[test]
fn every_alert_and_every_panel_reads_metrics_that_there_are_by_labels_that_they_have() {
    let metrics = metrics();
    for Alert { alert, expr, labels, annotations } in alerts() {
        let query = Query::of(&expr, &metrics);
        let summary = &annotations["summary"];
        for label in shown(summary, "$labels.") {
            assert!(query.labels.contains(label), "{alert} shows {label}, and has only {:?}", query.labels);
        }
        assert!(["critical", "warning"].contains(&labels["severity"].as_str()), "{alert}");
    }
    for panel in panels() {
        for (expr, legend) in queries(&panel) {
            let query = Query::of(&expr, &metrics);
            for label in shown(legend, "{{") {
                assert!(query.labels.contains(label), "{} shows {label}, and has only {:?}", panel["title"], query.labels);
            }
        }
    }
}

#[test]
fn every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_nearly_does() {
    let (cases, metrics) = (cases(), metrics());
    for Alert { alert, expr, .. } in alerts() {
        let query = Query::of(&expr, &metrics);
        let reads: BTreeSet<&str> = query.selectors.iter().filter_map(|selector| selector.name.as_deref()).collect();
        let of_it: Vec<_> = cases
            .iter()
            .flat_map(|case| case.alert_rule_test.iter().filter(|test| test.alertname == alert).map(move |test| (case, test)))
            .collect();
        assert!(of_it.iter().any(|(_, test)| !test.exp_alerts.is_empty()), "{alert} never fires in ops/alerts_test.yaml");
        assert!(of_it.iter().any(|(_, test)| test.exp_alerts.is_empty()), "{alert} is never nearly there in ops/alerts_test.yaml");
        for (case, _) in of_it {
            let is_read = |input: &Input| reads.contains(input.series.split('{').next().unwrap_or_default());
            assert!(case.input_series.iter().any(is_read), "a case of {alert} has nothing that it reads");
        }
    }
    for Input { series } in cases.iter().flat_map(|case| &case.input_series) {
        Query::of(series, &metrics);
    }
}

#[test]
fn every_alert_has_a_runbook_of_its_own_name_and_no_runbook_is_left_over() {
    let document = read("docs/OPERATIONS.md");
    let runbooks: BTreeSet<&str> = document.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let alerts = alerts();
    for Alert { alert, annotations, .. } in &alerts {
        assert_eq!(annotations["runbook"], format!("docs/OPERATIONS.md#{}", alert.to_lowercase()));
        assert!(runbooks.contains(alert.as_str()), "docs/OPERATIONS.md has no section {alert}");
    }
    let known: BTreeSet<&str> = alerts.iter().map(|alert| alert.alert.as_str()).collect();
    assert_eq!(known.len(), alerts.len(), "two alerts of one name");
    let left: Vec<_> = runbooks.iter().filter(|name| name.starts_with("Onceward") && !known.contains(*name)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_dashboard_shows_each_alert_with_its_own_threshold() {
    let (metrics, panels) = (metrics(), panels());
    assert!(panels.len() <= 25, "{} panels are more than one looks at", panels.len());
    for Alert { alert, expr, .. } in alerts() {
        let named = |panel: &&Value| {
            let words = panel["description"].as_str().unwrap_or_default();
            words.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == alert)
        };
        let panel = panels.iter().find(named).unwrap_or_else(|| panic!("no panel's description names {alert}"));
        // What is only ever a whole number is above nothing from one on, and what is or is not so is drawn as one.
        let limits = Query::of(&expr, &metrics).limits;
        let is_limit = |step: &Value| {
            step["value"].as_f64().is_some_and(|value| limits.contains(&value) || value == 1.0 && limits.contains(&0.0))
        };
        let overrides = panel["fieldConfig"]["overrides"].as_array().expect("overrides");
        let properties = overrides.iter().flat_map(|of| of["properties"].as_array().expect("properties"));
        let thresholds = properties.filter(|property| property["id"] == "thresholds").map(|property| &property["value"]);
        let mut steps = thresholds
            .chain([&panel["fieldConfig"]["defaults"]["thresholds"]])
            .flat_map(|of| of["steps"].as_array().expect("steps"));
        assert!(steps.any(is_limit), "{} has no threshold of {alert}, which are {limits:?}", panel["title"]);
    }
}

#[test]
fn the_dashboard_can_be_imported_anywhere() {
    let dashboard: Value = serde_json::from_str(&read("ops/grafana/onceward.json")).expect("JSON");
    assert!(dashboard["schemaVersion"].as_i64() >= Some(36) && dashboard["__inputs"].is_array());
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    let names: Vec<_> = variables.iter().map(|variable| variable["name"].as_str().unwrap_or_default()).collect();
    assert_eq!(names, ["datasource", "job", "group", "instance"]);
    let ids: BTreeSet<_> = dashboard["panels"].as_array().expect("panels").iter().map(|panel| panel["id"].as_i64()).collect();
    assert_eq!(ids.len(), dashboard["panels"].as_array().expect("panels").len(), "two panels of one id");
    for panel in panels() {
        let title = panel["title"].as_str().expect("a title");
        assert!(panel["description"].as_str().is_some_and(|words| words.ends_with('.')), "{title} is not explained");
        assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{title} has no unit");
        let sources = panel["targets"].as_array().expect("targets").iter().chain([&panel]);
        for source in sources {
            assert_eq!(source["datasource"]["uid"], "${datasource}", "{title}");
        }
        for (expr, _) in queries(&panel) {
            assert!(expr.contains("job=~\"$job\""), "{title} shows the processes of every job");
        }
    }
}

/// Prometheus' own checker, if it is there: `.ci/run` unpacks it, and Debian has it in `prometheus`.
fn promtool() -> Option<PathBuf> {
    let named = env::var_os("ONCEWARD_TEST_PROMTOOL").map(PathBuf::from);
    let paths = env::var_os("PATH").unwrap_or_default();
    named.or_else(|| env::split_paths(&paths).map(|folder| folder.join("promtool")).find(|tool| tool.is_file()))
}

#[test]
fn prometheus_takes_the_rules_and_each_fires_and_stays_silent_where_its_cases_say() {
    let Some(promtool) = promtool() else {
        return eprintln!("there is no promtool in PATH and no ONCEWARD_TEST_PROMTOOL");
    };
    for arguments in [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]] {
        let output = Command::new(&promtool).args(arguments).current_dir(root().join("ops")).output().expect("promtool runs");
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(output.status.success() && said.contains("SUCCESS"), "promtool {}: {said}", arguments.join(" "));
    }
}

/// One series of a scrape.
struct Series {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// No label value of this test has a comma or a quotation mark in it.
fn scrape(engine: &Engine) -> Vec<Series> {
    let (_, text) = eventually("the engine tells its metrics", || engine.get("/metrics"));
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let series = lines.map(|line| {
        let (series, value) = line.rsplit_once(' ').expect("a name and a number");
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()).map(|label| {
            let (label, value) = label.split_once('=').expect("a label");
            (label.to_owned(), value.trim_matches('"').to_owned())
        });
        Series { name: name.to_owned(), labels: labels.collect(), value: value.parse().expect("a number") }
    });
    series.collect()
}

#[test]
fn a_run_with_a_held_event_and_an_unknown_payment_has_every_series_that_an_alert_reads() {
    let (world, stub) = (World::with_partitions(1), stub());
    let (good, unknown) = (Order::new(), Order::new().amount("7.50"));
    stub.script([Script::for_order(unknown.order_id, Act::stored_failure())]);
    world.topic.send([good.message(), Message::new("no event"), unknown.message(), good.message()]);
    let engine = world.engine().provider(&stub.url()).set("retry.max_attempts", 2).start();
    eventually_equal("two are parked", vec!["undecodable parked".to_owned(), "unknown parked".to_owned()], || {
        world.database.column("SELECT reason || ' ' || state FROM held_event ORDER BY reason")
    });
    let value = |name: &str, labels: &[(&str, &str)]| engine.metric(name, labels);
    let parked = [("reason", "unknown"), ("state", "parked"), ("group", world.group.as_str()), ("topic", world.topic.name())];
    eventually_equal("the unknown payment is told", 1.0, || value("onceward_held_events", &parked));
    eventually_equal("all is settled and committed", 0, || world.topic.lag(&world.group));
    eventually_equal("Kafka's answer is told", 4.0, || value("onceward_committed_offset", &[]));

    let (metrics, scraped) = (metrics(), scrape(&engine));
    for Alert { alert, expr, .. } in alerts() {
        for selector in Query::of(&expr, &metrics).selectors {
            let name = selector.name.clone().expect("a name");
            let matchers = selector.matchers.matchers.iter().filter(|matcher| !TARGET.contains(&matcher.name.as_str()));
            let matchers: Vec<_> = matchers.collect();
            let fits = |series: &&Series| {
                let has = |label: &String| series.labels.get(label).map(String::as_str).unwrap_or_default();
                series.name == name && matchers.iter().all(|matcher| matcher.is_match(has(&matcher.name)))
            };
            let Some(found) = scraped.iter().find(fits) else {
                assert_eq!(name, "up", "{alert} reads a series that a run does not have: {selector}");
                continue;
            };
            let labels: BTreeSet<String> = found.labels.keys().map(String::as_str).chain(TARGET).map(str::to_owned).collect();
            assert_eq!(labels, metrics.get(&name).expect("it is known").labels(), "{selector}");
        }
    }
    let of = |name: &str| scraped.iter().filter(|series| series.name == name).map(|series| series.value).sum::<f64>();
    assert_eq!((of("onceward_group_partitions"), of("onceward_partition_epoch")), (1.0, 1.0));
    assert_eq!(of("onceward_ready"), 7.0, "everything is green");
    assert_eq!(value("onceward_not_charged_again_total", &[("cause", "produced_again"), ("currency", "EUR")]), 10.0);
    assert!(engine.terminate().success());
}
