//! The service: everything wired together, started, and ended in order.
//!
//! In: a checked configuration and a handler. Out: success, or why the process must end. It owns the actor system. Whatever core part
//! dies, the process ends non-zero within seconds and with readiness red: a service that is half alive is worse than one that restarts.
//!
//! Invariant: nothing is read before the schema is current and every blocking condition holds, and success means that the group was left in
//! order.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use actix::prelude::*;
use anyhow::{Context as _, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::admin::Admin;
use crate::billing::Billing;
use crate::certificate::{self, Objection};
use crate::config::{Config, ProviderConfig, ProviderKind};
use crate::handler::{Handler, Pause};
use crate::held::RetryPolicy;
use crate::metrics;
use crate::pipeline::client::{Client, Login};
use crate::pipeline::dedup::Engine;
use crate::pipeline::offset::OffsetActor;
use crate::pipeline::payment::PaymentActor;
use crate::pipeline::poll::PollThread;
use crate::pipeline::relay::Relay;
use crate::pipeline::supervisor::{Shutdown, Supervisor, Wiring};
use crate::pipeline::takeover::Rules;
use crate::pipeline::window::Buffer;
use crate::pipeline::workers::Workers;
use crate::provider::{self, Breaker};
use crate::retention::{Days, oldest_record_ms};
use crate::spans::Spans;
use crate::status::{Readiness, Status};
use crate::store::processed_events::ClaimTable;
use crate::store::{self, Store, attempts, consumed_partitions, held_events, held_requests, retention};

/// The wait between two tries while the database or the broker is away at the start.
const RETRY: Duration = Duration::from_millis(500);
/// Beyond the drain: the last commit, and leaving the group. Nobody may kill the process before both are over.
pub const LEAVE: Duration = Duration::from_secs(10);
/// How often the database is asked whether it is there, and the held events are counted.
const UPKEEP: Duration = Duration::from_secs(2);
/// From when on readiness tells that the downstream is not called.
const PAUSE_IS_LONG: Duration = Duration::from_secs(5);

/// Ends the process with a reason: the first one counts.
#[derive(Clone, Debug)]
pub struct Fatal(mpsc::UnboundedSender<String>);

/// Ends the process when it is dropped: held by whatever must not die.
#[derive(Debug)]
pub struct DeathNotice {
    who: &'static str,
    fatal: Fatal,
}

/// Runs the service until SIGTERM or SIGINT: billing, on an actor system of its own.
///
/// # Errors
/// Why the process must end with a non-zero code.
pub fn run(config: Config) -> anyhow::Result<()> {
    as_the_process(async move {
        let stop = stop_signal()?;
        let (fatal, ends) = Fatal::channel();
        let spans = Spans::start(&config)?;
        let billing = billing(&config, &fatal, spans.clone())?;
        serve_until(config, billing, spans, stop, &fatal, ends).await
    })
}

/// The same with any handler.
///
/// # Errors
/// As [`run`].
pub fn run_handler(config: Config, handler: impl Handler) -> anyhow::Result<()> {
    as_the_process(async move {
        let stop = stop_signal()?;
        serve(config, |_| handler, stop).await
    })
}

/// On an actor system whose end is the process's.
fn as_the_process(service: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let system = System::new();
    let ended = system.block_on(service);
    // Dropping it would wait for questions to Kafka that nobody needs an answer to any more, for as long as each may take.
    std::mem::forget(system);
    ended
}

/// Runs the engine with any handler until `stop` resolves; to be awaited inside an actix system.
///
/// # Errors
/// Why it cannot go on, or could not end in order.
pub async fn serve<H: Handler>(
    config: Config,
    handler: impl FnOnce(&Store) -> H,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let (fatal, ends) = Fatal::channel();
    let spans = Spans::start(&config)?;
    serve_until(config, handler, spans, stop, &fatal, ends).await
}

async fn serve_until<H: Handler>(
    config: Config,
    handler: impl FnOnce(&Store) -> H,
    spans: Spans,
    stop: impl Future<Output = ()>,
    fatal: &Fatal,
    mut ends: mpsc::UnboundedReceiver<String>,
) -> anyhow::Result<()> {
    let (readiness, status) = (Readiness::new(), Status::default());
    let admin = Admin::new(&config, readiness.clone(), status.clone())?;
    let place_of_client = admin.client();
    let port = admin.open(config.admin.listen)?;
    info!(address = %port.address, "admin port");
    actix::spawn(port.server);

    let store = Store::connect(&config.database.settings(), config.pipeline.partition_concurrency)?;
    tokio::pin!(stop);
    let (floor, claims) = tokio::select! {
        prepared = prepare(&config, &store, &readiness) => prepared?,
        () = &mut stop => return Ok(()),
    };
    say_start::<H>(&config, floor);

    let Started { supervisor, engine, client } =
        start(&config, handler(&store), (store.clone(), claims), (status.clone(), spans.clone()), readiness.clone(), fatal)?;
    let _ = place_of_client.set(client.clone()); // nobody has set it before
    if config.held.dead_letters {
        actix::spawn(relay(&config, store.clone()).run());
    }
    actix::spawn(crate::retention::upkeep(config.clone(), Arc::clone(&engine), client));
    actix::spawn(upkeep(config.clone(), engine, readiness.clone()));

    tokio::select! {
        reason = ends.recv() => {
            let reason = reason.unwrap_or_default();
            readiness.clear(Readiness::PROCESS, reason.clone());
            spans.stop();
            bail!(reason)
        }
        () = &mut stop => {}
    }
    info!("stopping: drain, commit, leave the group");
    readiness.clear(Readiness::PROCESS, "stopping");
    let ended = tokio::time::timeout(config.pipeline.drain + LEAVE, supervisor.send(Shutdown)).await;
    spans.stop();
    ended.context("the drain took too long; what had not settled comes again")??;
    info!("left the group");
    Ok(())
}

/// The service's own handler. A provider that is configured wrongly is found before anything is read.
fn billing(config: &Config, fatal: &Fatal, spans: Spans) -> anyhow::Result<impl FnOnce(&Store) -> Billing + use<>> {
    let ProviderConfig { kind, max_in_flight, breaker_failures, .. } = config.provider;
    let profile = config.provider.profile();
    let client = match kind {
        ProviderKind::None => None,
        ProviderKind::Http => {
            let settings = config.provider.settings().context("provider.url is missing")?;
            // Only for an actor that lives: a notice that is dropped asks for the end of the process.
            Some((provider::Client::new(&settings)?, fatal.notice("PaymentActor")))
        }
    };
    Ok(move |store: &Store| match client {
        None => Billing::without_provider(),
        Some((client, death)) => {
            let breaker = Breaker::new(breaker_failures);
            Billing::charging(store, PaymentActor::start(client, max_in_flight, breaker.clone(), spans, death), breaker, profile)
        }
    })
}

/// Resolves at the first SIGTERM or SIGINT.
fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Waits for the database, brings the schema up to date, asks for the blocking conditions, writes the floor's first value, makes the days
/// ahead.
async fn prepare(config: &Config, store: &Store, readiness: &Readiness) -> anyhow::Result<(Uuid, ClaimTable)> {
    let mut waited = false;
    loop {
        match prepare_once(config, store, readiness).await {
            Ok(prepared) => return Ok(prepared),
            Err(Prepare::Never(error)) => return Err(error),
            Err(Prepare::NotYet { latch, reason }) => {
                if !waited {
                    warn!(latch, reason, "waiting");
                    waited = true;
                }
                readiness.clear(latch, reason);
            }
        }
        actix::clock::sleep(RETRY).await;
    }
}

/// Why the start waits, or ends.
enum Prepare {
    NotYet { latch: &'static str, reason: String },
    Never(anyhow::Error),
}

async fn prepare_once(config: &Config, store: &Store, readiness: &Readiness) -> Result<(Uuid, ClaimTable), Prepare> {
    let database = |error: store::DbError| Prepare::NotYet { latch: Readiness::DATABASE, reason: error.to_string() };
    let mut session = store.control.get().await.map_err(|error| database(error.into()))?;
    readiness.set(Readiness::DATABASE);
    if !store::schema_is_current(&mut session).await.map_err(database)? {
        let applied = store::migrate(&config.database.settings()).await.map_err(|error| Prepare::Never(error.into()))?;
        info!(?applied, "schema migrated");
    }
    readiness.set(Readiness::SCHEMA);
    certificate::before_the_start(config, &mut session).await.map_err(|objection| match objection {
        Objection::Failed(_) => Prepare::Never(anyhow::anyhow!("{objection}")),
        Objection::NotAsked(_) => Prepare::NotYet { latch: Readiness::DATABASE, reason: objection.to_string() },
    })?;
    let floor = match retention::floor(&mut session).await.map_err(database)? {
        Some(floor) => floor,
        None => {
            let (client, topic) = (config.kafka.kafka_client_config(), config.kafka.topic.clone());
            let oldest = tokio::task::spawn_blocking(move || oldest_record_ms(client, &topic))
                .await
                .map_err(|error| Prepare::Never(error.into()))?;
            let oldest = oldest.map_err(|reason| Prepare::NotYet { latch: Readiness::ASSIGNMENT, reason })?;
            let kept = config.retention.replay_horizon.max(Some(config.retention.retention)).unwrap_or_default();
            retention::init_floor(&mut session, kept, oldest).await.map_err(database)?
        }
    };
    let claims = ClaimTable::read(&mut session).await.map_err(database)?;
    if claims.by_day {
        retention::ensure_days_ahead(&mut session, config.retention.days_ahead).await.map_err(database)?;
    }
    Ok((floor, claims))
}

/// One line that says what this process is about to do with other people's money.
fn say_start<H>(config: &Config, floor: Uuid) {
    let provider = config.provider.url.as_ref().map_or_else(|| "none".to_owned(), ToString::to_string);
    info!(
        topic = config.kafka.topic,
        group = config.kafka.group,
        start = ?config.kafka.start,
        handler = std::any::type_name::<H>(),
        provider,
        amount = ?config.provider.amount,
        retention_floor = %crate::event::id::day_text(floor),
        partition_concurrency = config.pipeline.partition_concurrency,
        "onceward {}",
        env!("CARGO_PKG_VERSION")
    );
}

/// What runs.
struct Started<H: Handler> {
    supervisor: Addr<Supervisor<H>>,
    engine: Arc<Engine<H>>,
    client: Client,
}

fn start<H: Handler>(
    config: &Config,
    handler: H,
    (store, claims): (Store, ClaimTable),
    (status, spans): (Status, Spans),
    readiness: Readiness,
    fatal: &Fatal,
) -> anyhow::Result<Started<H>> {
    let topic = config.kafka.topic.clone();
    let (commands, obeyed) = channel();
    let (events, asked) = mpsc::unbounded_channel();
    let buffer = Buffer::new(config.pipeline.buffer_bytes, commands.clone());
    let kafka = config.kafka.clone();
    let login = Login::new(move || kafka.kafka_client_config());
    let client = PollThread::start(login, topic.clone(), buffer, status.clone(), obeyed, events, fatal.notice("poll thread"))
        .context("the Kafka client refuses its configuration or the topic")?;

    let offsets = OffsetActor::new(topic.clone(), client.clone(), config.kafka.commit_interval, status.clone(), fatal).start();
    let engine = Engine {
        handler,
        store,
        group: config.kafka.group.as_str().into(),
        topic,
        owner: owner(),
        limits: config.database.settings().limits,
        effect_deadline: config.provider.effect_deadline,
        batch_max: config.pipeline.batch_max,
        retry: RetryPolicy {
            max_attempts: config.retry.max_attempts,
            max_age: config.retry.max_age,
            backoff_min: config.retry.backoff_min,
            backoff_max: config.retry.backoff_max,
        },
        held_max_open: config.held.max_open,
        future_skew: config.retention.future_skew,
        claims,
        days: Days::of(claims),
        status: status.clone(),
        spans,
    };
    let engine = Arc::new(engine);
    let workers =
        Workers::start(Arc::clone(&engine), offsets.clone(), config.pipeline.partition_concurrency, config.pipeline.drain);
    let wiring = Wiring {
        workers,
        offsets,
        commands,
        client: client.clone(),
        rules: Rules { start: config.kafka.start, on_gap: config.kafka.on_gap },
        drain: config.pipeline.drain,
        status,
        readiness,
        fatal: fatal.clone(),
    };
    Ok(Started { supervisor: Supervisor::new(wiring, asked, fatal.notice("Supervisor")).start(), engine, client })
}

fn relay(config: &Config, store: Store) -> Relay {
    Relay { store, kafka: config.kafka.clone(), owner: owner(), producer: None }
}

/// Who we are, for people who look at `consumed_partition`.
pub(crate) fn owner() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "unknown".to_owned());
    format!("{}:{}", host.trim(), std::process::id())
}

/// What must be looked at now and then, whoever owns the partitions. Every failure here is the database's, and shows in readiness.
async fn upkeep<H: Handler>(config: Config, engine: Arc<Engine<H>>, readiness: Readiness) {
    let mut ticks = actix::clock::interval(UPKEEP);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        show_pools(&engine.store);
        metrics::upkeep();
        show_pause(engine.handler.pause(), &engine.status, &readiness);
        match upkeep_once(&config, &engine, &readiness).await {
            Ok(()) => readiness.set(Readiness::DATABASE),
            Err(error) => readiness.clear(Readiness::DATABASE, error.to_string()),
        }
    }
}

async fn upkeep_once<H>(config: &Config, engine: &Engine<H>, readiness: &Readiness) -> Result<(), store::DbError> {
    let mut session = engine.store.control.get().await?;
    // What an owner that never came back has left open: older than any transaction can be.
    attempts::convert_stale(&mut session, config.database.transaction_budget).await?;
    let kept = retention::kept(&mut session).await?;
    metrics::floor(&kept);
    if engine.claims.by_day {
        metrics::days(&kept);
    } else {
        metrics::no_days();
    }
    if engine.claims.by_day && kept.days_ahead() < i64::from(config.retention.days_ahead) {
        make_days(config, &mut session, readiness, kept.days_ahead()).await;
    } else {
        readiness.set(Readiness::DAYS);
    }
    let (group, topic) = (&config.kafka.group, &config.kafka.topic);
    engine.status.known_partitions(consumed_partitions::count(&mut session, group, topic).await?);
    let held = held_events::counts(&mut session, group, topic).await?;
    engine.status.held(held, held_requests::count(&mut session, group, topic).await?);
    Ok(())
}

/// Nothing stands still yet when a day cannot be made, so it is told days before it hurts.
async fn make_days(config: &Config, session: &mut store::Session, readiness: &Readiness, ahead: i64) {
    if let Err(error) = retention::ensure_days_ahead(session, config.retention.days_ahead).await {
        readiness.clear(Readiness::DAYS, format!("no day can be made, and {ahead} are there after today: {error}"));
    }
}

/// A downstream that asks for a second of peace is no reason to take this process out of a rotation.
fn show_pause(pause: Option<Pause>, status: &Status, readiness: &Readiness) {
    match pause.as_ref().filter(|pause| pause.since.elapsed() >= PAUSE_IS_LONG) {
        Some(pause) => readiness.clear(Readiness::PROVIDER, pause.reason.clone()),
        None => readiness.set(Readiness::PROVIDER),
    }
    status.paused(pause.map(|pause| pause.reason));
}

fn show_pools(store: &Store) {
    let pools = [
        (metrics::PoolName::Claims, &store.claims),
        (metrics::PoolName::Attempts, &store.attempts),
        (metrics::PoolName::Control, &store.control),
    ];
    for (name, pool) in pools {
        let pool = pool.status();
        metrics::pool_in_use(name, pool.size.saturating_sub(pool.available));
    }
}

impl Fatal {
    /// The sender and where the reasons arrive.
    #[must_use]
    pub fn channel() -> (Self, mpsc::UnboundedReceiver<String>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), receiver)
    }

    /// Asks for the end.
    pub fn end(&self, reason: impl Into<String>) {
        let reason = reason.into();
        error!(reason, "the process must end");
        // After the first reason nobody listens any more.
        let _ = self.0.send(reason);
    }

    /// A notice that asks for the end when `who` dies.
    #[must_use]
    pub fn notice(&self, who: &'static str) -> DeathNotice {
        DeathNotice { who, fatal: self.clone() }
    }
}

impl Drop for DeathNotice {
    fn drop(&mut self) {
        // After an orderly stop nobody listens any more; before it, this is the reason the process ends for.
        let _ = self.fatal.0.send(format!("the {} died", self.who));
    }
}
