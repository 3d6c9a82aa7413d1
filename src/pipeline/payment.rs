//! PaymentActor: all calls to the provider, from all partitions.
//!
//! In: the charges of one batch, in offset order, with a deadline and a stop flag. Out: for each, its answer, or that it was not
//! started. It owns the client and the permits, and tells the breaker; it runs on a thread of its own, because one single-threaded
//! runtime makes the cheapest calls. If it dies here, every call that had begun is left in [`Answers`] as unknown.
//!
//! Invariant: a call starts only while nothing speaks against it (stop flag, breaker, and it could not end before the deadline on both
//! clocks), asked just before the request; and never before an earlier event of its key has been answered.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use actix::{Actor, Addr, Arbiter, Context, Handler, Message, ResponseFuture};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use uuid::Uuid;

use crate::app::DeathNotice;
use crate::crash::CrashPoint;
use crate::handler::{Answers, EventDigest, StopFlag};
use crate::metrics::{self, CallClass};
use crate::provider::{Answer, Breaker, Client, Found};
use crate::spans::Spans;
use crate::trace_context::TraceContext;

/// The mailbox: one message per batch, so this many partitions can wait here before their senders wait.
const MAILBOX: usize = 16;

/// The actor; see the head of this file.
#[derive(Debug)]
pub struct PaymentActor {
    desk: Rc<Desk>,
    _death: DeathNotice,
}

/// The charges of one batch.
#[derive(Debug)]
pub struct ChargeBatch {
    /// In offset order.
    pub charges: Vec<Charge>,
    /// No call may start that could end after this, on the clock that never jumps…
    pub deadline: Instant,
    /// … and on the one that also counts while the machine is suspended.
    pub deadline_wall: SystemTime,
    /// Raised: start no call.
    pub stop: StopFlag,
    /// Where each answer goes as soon as it is known.
    pub answers: Answers<Kept>,
}

/// One charge that may be asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge {
    /// The event: the idempotency key.
    pub event_id: Uuid,
    /// Charges of one sequence are asked for one after the other, and not at all behind one whose effect may still come.
    pub key: i64,
    /// The event's content.
    pub digest: EventDigest,
    /// The bytes to post.
    pub body: Arc<[u8]>,
    /// Unknown answers of earlier attempts.
    pub unknown_before: i32,
    /// The provider may have forgotten the key: it is asked first what became of the charge. "There is none" is believed after this time.
    pub find_first: Option<Duration>,
    /// What the provider is told of the trace that the event belongs to.
    pub trace: Option<Arc<TraceContext>>,
}

/// What became of one charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Called {
    /// The provider may have heard of it, and this is what it said.
    Answered(Kept),
    /// It has not: nobody was called, or the call was refused unread.
    NotStarted {
        /// How long not to try.
        wait: Duration,
    },
    /// Nobody was called: the effect of an earlier event of its sequence may still come.
    Behind,
}

/// An answer as it survives a rolled-back transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// What the provider said.
    pub answer: Answer,
    /// The event's content.
    pub digest: EventDigest,
    /// The bytes that were posted.
    pub body: Arc<[u8]>,
    /// Unknown answers since the attempt's row was last written, this one included.
    pub unknown_answers: i32,
    /// Calls for this event, as far as they are known.
    pub attempts: i32,
    /// The charge may have been posted. If not, the provider was only asked what became of an earlier one.
    pub posted: bool,
}

impl Message for ChargeBatch {
    type Result = Vec<Called>;
}

impl PaymentActor {
    /// Starts the actor on a thread of its own, with at most `max_in_flight` calls open at once. Needs a running actix system.
    #[must_use]
    pub fn start(client: Client, max_in_flight: usize, breaker: Breaker, spans: Spans, death: DeathNotice) -> Addr<Self> {
        Self::start_in_arbiter(&Arbiter::new().handle(), move |context: &mut Context<Self>| {
            context.set_mailbox_capacity(MAILBOX);
            Self { desk: Rc::new(Desk::new(client, max_in_flight, breaker, spans)), _death: death }
        })
    }
}

impl Actor for PaymentActor {
    type Context = Context<Self>;
}

impl Handler<ChargeBatch> for PaymentActor {
    type Result = ResponseFuture<Vec<Called>>;

    fn handle(&mut self, batch: ChargeBatch, _: &mut Context<Self>) -> Self::Result {
        let desk = Rc::clone(&self.desk);
        Box::pin(async move { desk.charge_all(&batch).await })
    }
}

/// What all batches share.
#[derive(Debug)]
struct Desk {
    client: Client,
    permits: Arc<Semaphore>,
    breaker: Breaker,
    spans: Spans,
}

type Permit = Pin<Box<dyn Future<Output = OwnedSemaphorePermit>>>;

impl Desk {
    fn new(client: Client, max_in_flight: usize, breaker: Breaker, spans: Spans) -> Self {
        Self { client, permits: Arc::new(Semaphore::new(max_in_flight)), breaker, spans }
    }

    /// One batch, to its end: each permit goes to the startable charge with the lowest offset (a probe to one that has not
    /// failed before, if there is one: the failure may be the event's own).
    async fn charge_all(&self, batch: &ChargeBatch) -> Vec<Called> {
        let mut queue = Queue::new(&batch.charges);
        let mut open = FuturesUnordered::new();
        let mut permit: Option<Permit> = None;
        let now = Instant::now();
        let last_start = batch.deadline.checked_sub(self.client.call_timeout()).unwrap_or(now).max(now);
        let mut closing = pin!(tokio::time::sleep_until(last_start.into()));
        loop {
            if let Err(wait) = self.may_start(batch) {
                queue.give_up(wait);
            }
            if queue.ready.is_empty() {
                // A permit that is waited for but not used would be kept from the other batches.
                permit = None;
                if open.is_empty() {
                    return queue.results();
                }
            }
            let some_ready = !queue.ready.is_empty();
            tokio::select! {
                biased;
                Some((index, called)) = open.next(), if !open.is_empty() => queue.done(index, called),
                granted = permit.get_or_insert_with(|| self.permit()), if some_ready => {
                    permit = None;
                    let good_probe = |index: &&usize| {
                        let charge = &batch.charges[**index];
                        !self.breaker.prefers_another(charge.event_id, charge.unknown_before > 0)
                    };
                    if let Some(index) = queue.ready.iter().find(good_probe).or(queue.ready.first()).copied() {
                        queue.ready.remove(&index);
                        open.push(async move { (index, self.charge(batch, &batch.charges[index], granted).await) });
                    }
                }
                () = &mut closing, if some_ready => {}
            }
        }
    }

    fn permit(&self) -> Permit {
        let permits = Arc::clone(&self.permits);
        Box::pin(async move {
            match permits.acquire_owned().await {
                Ok(permit) => permit,
                Err(_) => unreachable!("nobody closes the permits"),
            }
        })
    }

    async fn charge(&self, batch: &ChargeBatch, charge: &Charge, _permit: OwnedSemaphorePermit) -> Called {
        let Charge { event_id, digest, ref body, unknown_before, .. } = *charge;
        let begun = Instant::now();
        let before = batch.answers.get(event_id);
        let not_written = before.as_ref().map_or(0, |kept| kept.unknown_answers);
        let had_unknown = unknown_before + not_written > 0;
        if !self.in_time(batch) {
            return Called::NotStarted { wait: Duration::ZERO };
        }
        let call = match self.breaker.begin(event_id, had_unknown, begun) {
            Ok(call) => call,
            Err(wait) => return Called::NotStarted { wait },
        };
        let keep = |answer: Answer, posted| Kept {
            unknown_answers: not_written + i32::from(answer.is_unknown()),
            attempts: unknown_before + not_written + 1,
            digest,
            body: Arc::clone(body),
            answer,
            posted,
        };
        // If this call ends in any other way than by its answer, this is what is known.
        batch.answers.keep(event_id, keep(Answer::unknown("the call was cut off on our side".to_owned()), true));
        let span = self.spans.call(charge.trace.as_ref());
        let (mut answer, posted) = self.ask(batch, charge, had_unknown, span.trace()).await;
        span.answered(&answer);
        CrashPoint::Answered.passed();
        metrics::provider_call(call_class(&answer), begun.elapsed());
        if call.heard(&answer, Instant::now()) {
            answer = answer.of_one_event(had_unknown);
        }
        if let Answer::TooMany { wait } | Answer::NotReached { wait, .. } = answer {
            match before {
                Some(before) => batch.answers.keep(event_id, before),
                None => batch.answers.forget([event_id]),
            }
            return Called::NotStarted { wait };
        }
        let kept = keep(answer, posted);
        batch.answers.keep(event_id, kept.clone());
        Called::Answered(kept)
    }

    /// Posts the charge; if its key may be forgotten, only once it is known that there is none. Out: the answer, and whether it was posted.
    async fn ask(&self, batch: &ChargeBatch, charge: &Charge, had_unknown: bool, trace: Option<&TraceContext>) -> (Answer, bool) {
        let post = |had_unknown| self.client.charge(charge.event_id, charge.body.to_vec(), had_unknown, trace);
        let Some(unsettled) = charge.find_first else { return (post(had_unknown).await, true) };
        let later = |why: &str, wait| Answer::InProgress { error: format!("the provider knows no such charge, {why}"), wait };
        let found = match self.client.find(charge.event_id, trace).await {
            Found::Charge { charge_id } => Answer::Charged { charge_id },
            Found::Unclear(answer) => answer,
            Found::Nothing if !unsettled.is_zero() => later("but the last attempt was too recently", Some(unsettled)),
            Found::Nothing if !self.in_time(batch) => later("and no time was left to make it", None),
            // Whatever was asked before has not happened: this answer is the first.
            Found::Nothing => return (post(false).await, true),
        };
        (found, false)
    }

    /// Whether a call may start now; if not, how long not to try.
    fn may_start(&self, batch: &ChargeBatch) -> Result<(), Duration> {
        match self.breaker.wait(Instant::now()) {
            Some(wait) => Err(wait),
            None if self.in_time(batch) => Ok(()),
            None => Err(Duration::ZERO),
        }
    }

    /// Whether a call that starts now is wanted and can end before the deadline, on both clocks.
    fn in_time(&self, batch: &ChargeBatch) -> bool {
        let longest = self.client.call_timeout();
        !batch.stop.is_raised() && Instant::now() + longest < batch.deadline && SystemTime::now() + longest < batch.deadline_wall
    }
}

/// Which charges of a batch can start, by index = by offset.
struct Queue {
    /// No earlier event of their key is open.
    ready: BTreeSet<usize>,
    /// Those behind the first of each key.
    behind: HashMap<i64, VecDeque<usize>>,
    keys: Vec<i64>,
    results: Vec<Option<Called>>,
}

impl Queue {
    fn new(charges: &[Charge]) -> Self {
        let mut ready = BTreeSet::new();
        let mut behind: HashMap<i64, VecDeque<usize>> = HashMap::with_capacity(charges.len());
        for (index, charge) in charges.iter().enumerate() {
            match behind.get_mut(&charge.key) {
                Some(tail) => tail.push_back(index),
                None => {
                    behind.insert(charge.key, VecDeque::new());
                    ready.insert(index);
                }
            }
        }
        Self { ready, behind, keys: charges.iter().map(|charge| charge.key).collect(), results: vec![None; charges.len()] }
    }

    /// Takes a result. The next of the key can start, unless this one was not started or its effect may still come: then none of them
    /// is.
    fn done(&mut self, index: usize, called: Called) {
        let of_the_others = for_later(&called);
        self.results[index] = Some(called);
        let Some(tail) = self.behind.get_mut(&self.keys[index]) else { return };
        if let Some(same) = of_the_others {
            for later in tail.drain(..) {
                self.results[later] = Some(same.clone());
            }
        } else if let Some(next) = tail.pop_front() {
            self.ready.insert(next);
        }
    }

    /// Starts nothing more of what could start now.
    fn give_up(&mut self, wait: Duration) {
        while let Some(index) = self.ready.pop_first() {
            self.done(index, Called::NotStarted { wait });
        }
    }

    fn results(self) -> Vec<Called> {
        let results = self.results.into_iter().map(|result| result.unwrap_or(Called::NotStarted { wait: Duration::ZERO }));
        results.collect()
    }
}

/// What becomes of the later ones of a sequence; `None`: they can start.
fn for_later(called: &Called) -> Option<Called> {
    match called {
        Called::NotStarted { wait } => Some(Called::NotStarted { wait: *wait }),
        Called::Behind => Some(Called::Behind),
        Called::Answered(kept) => match &kept.answer {
            Answer::Charged { .. } | Answer::Declined { .. } | Answer::Rejected { .. } => None,
            Answer::Configuration { wait, .. } | Answer::TooMany { wait } | Answer::NotReached { wait, .. } => {
                Some(Called::NotStarted { wait: *wait })
            }
            Answer::Mismatch { .. } | Answer::InProgress { .. } | Answer::Unavailable { .. } | Answer::Unknown { .. } => {
                Some(Called::Behind)
            }
        },
    }
}

const fn call_class(answer: &Answer) -> CallClass {
    match answer {
        Answer::Charged { .. } => CallClass::Charged,
        Answer::Declined { .. } => CallClass::Declined,
        Answer::Rejected { .. } => CallClass::Rejected,
        Answer::Configuration { .. } => CallClass::Configuration,
        Answer::InProgress { .. } => CallClass::InProgress,
        Answer::TooMany { .. } | Answer::NotReached { .. } => CallClass::NotStarted,
        Answer::Mismatch { .. } | Answer::Unavailable { .. } | Answer::Unknown { .. } => CallClass::Unknown,
    }
}

#[cfg(test)]
#[cfg(feature = "lab")]
mod tests {
    use super::*;
    use crate::lab::provider_stub::{Act, Options, ProviderStub, Rule};
    use crate::provider::profile::tests::profile;
    use crate::provider::{AmountForm, Settings};
    use crate::tls::Tls;

    fn client(stub: &ProviderStub, call_timeout: Duration) -> Client {
        let (url, profile) = (stub.url(), crate::provider::Profile { amount: AmountForm::Decimal, ..profile() });
        Client::new(&Settings { url, token: None, tls: Tls::default(), call_timeout, max_in_flight: 8, profile }).unwrap()
    }

    fn stub(script: Vec<Rule>) -> ProviderStub {
        ProviderStub::start(Options { script, ..Options::default() }).unwrap()
    }

    fn desk(stub: &ProviderStub, max_in_flight: usize) -> Desk {
        Desk::new(client(stub, Duration::from_secs(10)), max_in_flight, Breaker::new(10), Spans::default())
    }

    /// One charge per order id, in this order.
    fn batch(orders: &[i64]) -> ChargeBatch {
        let charge = |order: &i64| Charge {
            event_id: Uuid::now_v7(),
            key: *order,
            digest: EventDigest(1),
            body: format!(r#"{{"orderId":{order},"amount":10.00,"currency":"EUR"}}"#).into_bytes().into(),
            unknown_before: 0,
            find_first: None,
            trace: None,
        };
        let far = Duration::from_secs(60);
        ChargeBatch {
            charges: orders.iter().map(charge).collect(),
            deadline: Instant::now() + far,
            deadline_wall: SystemTime::now() + far,
            stop: StopFlag::default(),
            answers: Answers::default(),
        }
    }

    fn classes(called: &[Called]) -> Vec<&'static str> {
        let class = |called: &Called| match called {
            Called::Answered(kept) => kept.answer.class(),
            Called::NotStarted { .. } => "not_started",
            Called::Behind => "behind",
        };
        called.iter().map(class).collect()
    }

    fn ids(batch: &ChargeBatch) -> Vec<String> {
        batch.charges.iter().map(|charge| charge.event_id.to_string()).collect()
    }

    #[actix::test]
    async fn the_actor_answers_a_batch_on_its_own_thread_in_the_order_of_the_charges() {
        let stub = stub(vec![Rule::for_order(2, Act::declined())]);
        let death = crate::app::Fatal::channel().0.notice("PaymentActor");
        let payment = PaymentActor::start(client(&stub, Duration::from_secs(10)), 8, Breaker::new(10), Spans::default(), death);
        let batch = batch(&[1, 2, 3, 1]);
        let answers = batch.answers.clone();
        let ids = ids(&batch);
        let called = payment.send(batch).await.unwrap();
        assert_eq!(classes(&called), ["charged", "declined", "charged", "charged"]);
        assert_eq!(answers.all().len(), 4);
        let journal = stub.journal();
        let place = |id: &String| journal.iter().position(|posted| posted == id).unwrap();
        assert!(place(&ids[0]) < place(&ids[3]), "events of one key in their order");
    }

    #[tokio::test]
    async fn calls_start_in_offset_order() {
        let stub = stub(vec![]);
        let batch = batch(&[1, 2, 1, 3, 2, 1]);
        desk(&stub, 1).charge_all(&batch).await;
        assert_eq!(stub.journal(), ids(&batch), "with one permit, exactly so");
        assert_eq!(stub.calls().max_in_flight, 1);
    }

    #[tokio::test]
    async fn keys_run_side_by_side_events_of_one_key_do_not_and_all_batches_share_the_bound() {
        let stub = stub(vec![Rule::always(Act::Hold)]);
        let desk = desk(&stub, 3);
        let (first, second) = (batch(&[1, 1, 1]), batch(&[2, 3, 4]));
        let observe = async {
            stub.wait_until(|calls| calls.held == 3).await;
            let asked = |charge: &Charge| stub.journal().contains(&charge.event_id.to_string());
            assert_eq!(first.charges.iter().map(asked).collect::<Vec<_>>(), [true, false, false]);
            stub.clear_script();
            stub.release();
        };
        let (a, b, ()) = tokio::join!(desk.charge_all(&first), desk.charge_all(&second), observe);
        assert_eq!([classes(&a), classes(&b)].concat(), ["charged"; 6]);
        assert_eq!(stub.calls().max_in_flight, 3);
    }

    #[tokio::test]
    async fn a_raised_flag_lets_open_calls_end_and_starts_none() {
        let stub = stub(vec![Rule::once(Act::Hold)]);
        let (desk, batch) = (desk(&stub, 1), batch(&[1, 2, 1]));
        let observe = async {
            stub.wait_until(|calls| calls.held == 1).await;
            batch.stop.raise();
            stub.release();
        };
        let (called, ()) = tokio::join!(desk.charge_all(&batch), observe);
        assert_eq!(classes(&called), ["charged", "not_started", "not_started"]);
        assert_eq!(stub.calls().posts, 1);
        assert_eq!(batch.answers.all().len(), 1, "only what was asked");
    }

    #[tokio::test]
    async fn a_call_that_could_end_after_the_deadline_on_either_clock_is_not_started() {
        let stub = stub(vec![]);
        let desk = desk(&stub, 8);
        let short = desk.client.call_timeout();
        let too_late = ChargeBatch { deadline: Instant::now() + short, ..batch(&[1, 2]) };
        // Suspended: the monotonic clock has not noticed.
        let suspended = ChargeBatch { deadline_wall: SystemTime::now() + short, ..batch(&[1, 2]) };
        for late in [too_late, suspended] {
            assert_eq!(classes(&desk.charge_all(&late).await), ["not_started"; 2]);
        }
        assert_eq!(stub.calls().posts, 0);
        let in_time = ChargeBatch { deadline: Instant::now() + short + Duration::from_secs(5), ..batch(&[1, 2]) };
        assert_eq!(classes(&desk.charge_all(&in_time).await), ["charged"; 2]);
    }

    #[tokio::test]
    async fn a_batch_that_waits_for_a_permit_ends_when_no_call_could_end_in_time() {
        let stub = stub(vec![Rule::once(Act::Hold)]);
        let desk = desk(&stub, 1);
        let first = batch(&[1]);
        let waiting =
            ChargeBatch { deadline: Instant::now() + desk.client.call_timeout() + Duration::from_millis(100), ..batch(&[2]) };
        let second = async {
            stub.wait_until(|calls| calls.held == 1).await;
            let called = desk.charge_all(&waiting).await;
            stub.release();
            called
        };
        let (first, second) = tokio::join!(desk.charge_all(&first), second);
        assert_eq!((classes(&first), classes(&second)), (vec!["charged"], vec!["not_started"]));
    }

    #[tokio::test]
    async fn after_a_429_nobody_calls_until_the_wait_is_over() {
        let stub = stub(vec![Rule::once(Act::busy(429, "30"))]);
        let (desk, first, second) = (desk(&stub, 1), batch(&[1, 2, 1]), batch(&[3]));
        let called = desk.charge_all(&first).await;
        assert_eq!(called[0], Called::NotStarted { wait: Duration::from_secs(30) });
        assert_eq!(classes(&called), ["not_started"; 3]);
        assert!(first.answers.all().is_empty(), "nothing was begun");
        let [Called::NotStarted { wait }] = desk.charge_all(&second).await[..] else { panic!("not started") };
        assert!(wait > Duration::from_secs(20) && wait <= Duration::from_secs(30), "{wait:?}");
        assert_eq!(stub.calls().posts, 1);
    }

    #[tokio::test]
    async fn a_503_is_unknown_for_its_event_and_a_wait_for_all_others() {
        let stub = stub(vec![Rule::once(Act::busy(503, "30"))]);
        let (desk, batch) = (desk(&stub, 1), batch(&[1, 2]));
        assert_eq!(classes(&desk.charge_all(&batch).await), ["unavailable", "not_started"]);
        let kept = batch.answers.get(batch.charges[0].event_id).unwrap();
        assert_eq!((kept.unknown_answers, kept.attempts), (1, 1));
    }

    #[tokio::test]
    async fn after_a_configuration_answer_its_key_and_all_others_wait_and_the_attempt_is_kept() {
        let stub = stub(vec![Rule::once(Act::status(401))]);
        let (desk, batch) = (desk(&stub, 1), batch(&[1, 1, 2]));
        assert_eq!(classes(&desk.charge_all(&batch).await), ["configuration", "not_started", "not_started"]);
        let kept = batch.answers.all();
        assert_eq!(kept.len(), 1);
        assert_eq!((kept[0].0, kept[0].1.unknown_answers), (batch.charges[0].event_id, 0));
        assert_eq!(stub.calls().posts, 1);
    }

    #[tokio::test]
    async fn an_event_that_alone_is_refused_is_rejected_once_another_was_served() {
        let stub = stub(vec![Rule::for_order(1, Act::busy(403, "0"))]);
        let desk = desk(&stub, 1);
        let (first, rest) = (batch(&[1]), batch(&[2, 3]));
        assert_eq!(classes(&desk.charge_all(&first).await), ["configuration"]);
        let both = ChargeBatch { charges: [first.charges.clone(), rest.charges.clone()].concat(), ..batch(&[]) };
        tokio::time::sleep(desk.breaker.wait(Instant::now()).unwrap_or_default()).await;
        // The probe goes to another event, though the refused one stands first, and closes the breaker.
        assert_eq!(classes(&desk.charge_all(&both).await), ["rejected", "charged", "charged"]);
        assert_eq!(stub.journal()[1], rest.charges[0].event_id.to_string());
    }

    #[tokio::test]
    async fn while_the_probe_is_on_its_way_nobody_else_is_called() {
        let stub = stub(vec![Rule::once(Act::busy(429, "0")), Rule::once(Act::Hold)]);
        let (desk, first, second) = (desk(&stub, 8), batch(&[1]), batch(&[2, 3]));
        desk.charge_all(&first).await;
        tokio::time::sleep(desk.breaker.wait(Instant::now()).unwrap_or_default()).await;
        let observe = async {
            stub.wait_until(|calls| calls.held == 1).await;
            let called = desk.charge_all(&first).await;
            stub.release();
            called
        };
        let (probing, meanwhile) = tokio::join!(desk.charge_all(&second), observe);
        assert_eq!((classes(&probing), classes(&meanwhile)), (vec!["charged", "not_started"], vec!["not_started"]));
        assert_eq!(classes(&desk.charge_all(&first).await), ["charged"], "closed");
    }

    #[tokio::test]
    async fn a_provider_that_is_not_reached_leaves_no_trace_and_a_later_event_of_the_key_waits() {
        let stub = stub(vec![]);
        let desk = desk(&stub, 8);
        drop(stub);
        let batch = batch(&[1, 2, 1]);
        let earlier = Kept {
            answer: Answer::Configuration { error: String::new(), redirect: true, wait: Duration::ZERO },
            digest: EventDigest(1),
            body: Arc::default(),
            unknown_answers: 1,
            attempts: 1,
            posted: true,
        };
        batch.answers.keep(batch.charges[1].event_id, earlier.clone());
        assert_eq!(classes(&desk.charge_all(&batch).await), ["not_started"; 3]);
        assert_eq!(batch.answers.all(), [(batch.charges[1].event_id, earlier)], "what was known is still known");
    }

    #[tokio::test]
    async fn a_call_that_has_begun_is_unknown_until_it_is_answered() {
        let stub = stub(vec![Rule::once(Act::Hold)]);
        let (desk, batch) = (desk(&stub, 1), batch(&[1]));
        let id = batch.charges[0].event_id;
        let observe = async {
            stub.wait_until(|calls| calls.held == 1).await;
            let open = batch.answers.get(id).unwrap();
            stub.release();
            open
        };
        let (called, open) = tokio::join!(desk.charge_all(&batch), observe);
        assert_eq!((open.answer.class(), open.unknown_answers), ("unknown", 1));
        let [Called::Answered(kept)] = &called[..] else { panic!("answered") };
        assert_eq!((kept.answer.class(), kept.unknown_answers, kept.attempts), ("charged", 0, 1));
        assert_eq!(batch.answers.get(id).as_ref(), Some(kept));
    }

    #[tokio::test]
    async fn a_refusal_after_an_unknown_answer_stays_unknown() {
        let stub = stub(vec![Rule::always(Act::status(422))]);
        let (desk, mut batch) = (desk(&stub, 1), batch(&[1, 2]));
        batch.charges[1].unknown_before = 2;
        let called = desk.charge_all(&batch).await;
        assert_eq!(classes(&called), ["rejected", "unknown"]);
        let Called::Answered(kept) = &called[1] else { panic!("answered") };
        assert_eq!((kept.unknown_answers, kept.attempts), (1, 3));
    }

    #[tokio::test]
    async fn a_charge_whose_key_may_be_forgotten_is_looked_for_and_only_made_if_it_surely_does_not_exist() {
        let stub = stub(vec![]);
        let (desk, made) = (desk(&stub, 8), batch(&[1, 2, 3]));
        desk.charge_all(&made).await;
        stub.forget_keys();
        let old = |orders: &[i64], unsettled| {
            let mut batch = batch(orders);
            for charge in &mut batch.charges {
                (charge.find_first, charge.unknown_before) = (Some(unsettled), 1);
            }
            batch
        };
        let mut found = old(&[1], Duration::ZERO);
        found.charges[0].event_id = made.charges[0].event_id;
        let [Called::Answered(kept)] = &desk.charge_all(&found).await[..] else { panic!("answered") };
        assert_eq!(kept.answer, Answer::Charged { charge_id: "ch_00000001".to_owned() });
        let settle = Duration::from_secs(9);
        let too_early = desk.charge_all(&old(&[4], settle)).await;
        let [Called::Answered(Kept { answer: Answer::InProgress { wait, .. }, posted: false, .. })] = &too_early[..] else {
            panic!("{too_early:?}")
        };
        assert_eq!(*wait, Some(settle));
        assert_eq!(stub.calls().posts, 3, "nothing was posted");
        stub.script([Rule::for_order(5, Act::declined())]);
        assert_eq!(classes(&desk.charge_all(&old(&[4, 5], Duration::ZERO)).await), ["charged", "declined"], "a first answer");
        assert_eq!((stub.calls().posts, stub.calls().look_ups), (5, 4));
    }

    #[tokio::test]
    async fn an_empty_batch_is_answered() {
        let stub = stub(vec![]);
        assert_eq!(desk(&stub, 1).charge_all(&batch(&[])).await, []);
    }
}
