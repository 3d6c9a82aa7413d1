//! What follows from what is known of one event.
//!
//! In: the event, its kept answer, its payment row, its earlier attempt. Out: one [`Verdict`], its outcome and its row. It owns nothing
//! and calls nobody.
//!
//! Invariant: [`Verdict::Ask`] is said only when everything that is known allows one more post of the stored bytes.

use std::collections::HashSet;
use std::time::Duration;

use uuid::Uuid;

use crate::event::OrderConfirmed;
use crate::handler::{Event, Outcome, Trace};
use crate::pipeline::payment::{Called, Charge, Kept};
use crate::provider::{Answer, Profile, ProviderQuery};
use crate::store::attempts::{BegunAttempt, KnownAttempt, NewAttempt};
use crate::store::payments::{PaymentRow, PaymentStatus};

/// The word of an attempt's row that needs no call any more: its charge was made.
pub(super) const CHARGED: &str = "charged";

/// What is to become, or has become, of one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Somebody paid it already.
    Paid(PaymentStatus),
    /// The provider has answered, in this batch or before.
    Answered(Kept),
    /// Ask the provider.
    Ask(Charge),
    /// It was not asked.
    NotStarted {
        /// How long not to try.
        wait: Duration,
    },
    /// It was not asked: an earlier event of its sequence may still be charged.
    Behind,
    /// Its id is known with another content.
    Conflict {
        /// Which.
        error: String,
    },
    /// Its key may be forgotten: one more post could be one more charge.
    TooOld {
        /// How old.
        error: String,
    },
}

/// Decides before anybody is called.
pub(super) fn judge(
    event: &OrderConfirmed,
    kept: Option<Kept>,
    payment: Option<&PaymentRow>,
    known: Option<KnownAttempt>,
    profile: &Profile,
) -> Verdict {
    let digest = event.digest();
    if let Some(kept) = kept.filter(is_final) {
        return if kept.digest.contradicts(digest) {
            conflict("was asked for with another content")
        } else {
            Verdict::Answered(kept)
        };
    }
    if let Some(payment) = payment {
        return if pays(payment, event) { Verdict::Paid(payment.status) } else { conflict("has a payment of another content") };
    }
    let Some(known) = known else {
        let NewAttempt { event_id, digest, body, in_doubt: _ } = new_attempt(event, profile);
        let (key, body) = (event.order_id, body.into());
        return Verdict::Ask(Charge { event_id, key, digest, body, unknown_before: 0, find_first: None, trace: None });
    };
    if known.digest.contradicts(digest) {
        return conflict("has an attempt of another content");
    }
    let body = known.body.unwrap_or_else(|| profile.charge_body(event.order_id, event.total));
    if let Some(answer) = final_answer(known.answer.as_deref(), known.provider_charge_id) {
        let attempts = known.unknown_answers.saturating_add(1);
        return Verdict::Answered(Kept { answer, digest, body: body.into(), unknown_answers: 0, attempts, posted: false });
    }
    // Where every answer so far was a refusal, nothing was charged, and a forgotten key repeats nothing.
    let refused = known.unknown_answers == 0 && matches!(known.answer.as_deref(), Some("rejected" | "configuration"));
    let find_first = match profile.query {
        _ if refused || profile.still_knows_key(known.first_attempt_age) => None,
        ProviderQuery::IdempotencyKey => Some(profile.query_settle.saturating_sub(known.last_attempt_age)),
        ProviderQuery::None => {
            let hours = known.first_attempt_age.as_secs() / 3600;
            return Verdict::TooOld { error: format!("first asked for {hours} h ago: the provider may have forgotten the key") };
        }
    };
    Verdict::Ask(Charge {
        event_id: event.event_id,
        key: event.order_id,
        digest,
        body: body.into(),
        unknown_before: known.unknown_answers,
        find_first,
        trace: None,
    })
}

/// Whether a kept answer is used instead of another call. Only the answer that is no event's fault is asked for again: its event was
/// given back and comes with a new batch.
pub(super) const fn is_final(kept: &Kept) -> bool {
    !matches!(kept.answer, Answer::Configuration { .. })
}

/// The attempt of an event that may be asked for.
pub(super) fn new_attempt(event: &OrderConfirmed, profile: &Profile) -> NewAttempt {
    let body = profile.charge_body(event.order_id, event.total);
    NewAttempt { event_id: event.event_id, digest: event.digest(), body, in_doubt: false }
}

/// What stays of an attempt whose event has no payment row. `None`: nothing was added to what its row says already. A question is no
/// attempt: "no such charge" is believed so long after the last post, however often it was asked since.
pub(super) fn begun_attempt(event_id: Uuid, kept: Kept) -> Option<BegunAttempt> {
    let Kept { answer, digest, body, unknown_answers, attempts: _, posted } = kept;
    if !posted && !matches!(answer, Answer::Charged { .. }) {
        return None;
    }
    let word = answer.class().to_owned();
    let provider_charge_id = match answer {
        Answer::Charged { charge_id } => Some(charge_id),
        _ => None,
    };
    Some(BegunAttempt { event_id, digest, body: body.to_vec(), unknown_answers, answer: Some(word), provider_charge_id })
}

/// The row of `provider.kind = "none"`: nobody was asked.
pub(super) fn row_without_provider(event: &OrderConfirmed) -> PaymentRow {
    row(event, PaymentStatus::Charged, None, 0)
}

/// Another row stood where ours should be written (or none, and it was refused all the same).
pub(super) fn compare(ours: &PaymentRow, theirs: Option<&PaymentRow>) -> Outcome {
    let not_recorded = |why: &str| match &ours.provider_charge_id {
        Some(charge_id) => not_recorded(charge_id, why),
        None => Outcome::Unknown { error: format!("{}, {why}", ours.status.as_str()), wait: None, parked: true },
    };
    match theirs {
        None => not_recorded("but its payment row was not written, and there is none"),
        // Nobody was asked: nothing has happened that the other row does not tell.
        Some(theirs) if !same_payment(ours, theirs) && ours.attempts == 0 => conflict("has a payment of another content").outcome(),
        Some(theirs) if !same_payment(ours, theirs) => not_recorded("but its payment row is of another content"),
        Some(theirs) => match (ours.status, theirs.status) {
            (PaymentStatus::Charged, PaymentStatus::Declined) => not_recorded("but its payment row says declined"),
            (_, PaymentStatus::Charged) => Outcome::Applied,
            (_, PaymentStatus::Declined) => Outcome::Declined,
        },
    }
}

/// The database takes no row for an event that stood alone: what was known of it then.
pub(super) fn refused(kept: Option<Kept>, error: &str) -> Outcome {
    match kept.map(|kept| kept.answer) {
        Some(Answer::Charged { charge_id }) => not_recorded(&charge_id, &format!("but its row is refused: {error}")),
        Some(answer) if answer.is_unknown() => Outcome::Unknown {
            error: format!("the answer is not known, and its row is refused: {error}"),
            wait: None,
            parked: true,
        },
        Some(_) | None => Outcome::Refused { error: error.to_owned() },
    }
}

fn not_recorded(charge_id: &str, why: &str) -> Outcome {
    Outcome::NotRecorded { error: format!("charged as {charge_id}, {why}"), charge_id: charge_id.to_owned() }
}

/// Nobody is asked behind an earlier event of its sequence that may still be charged: what was known before already tells.
pub(super) fn stand_behind(verdicts: &mut [Verdict], sequences: &[i64]) {
    let mut held_up = HashSet::new();
    for (verdict, sequence) in verdicts.iter_mut().zip(sequences) {
        match verdict {
            Verdict::Ask(_) if held_up.contains(sequence) => *verdict = Verdict::Behind,
            Verdict::Ask(charge) => charge.key = *sequence,
            Verdict::Paid(_)
            | Verdict::Answered(_)
            | Verdict::NotStarted { .. }
            | Verdict::Behind
            | Verdict::Conflict { .. }
            | Verdict::TooOld { .. } => {
                if verdict.outcome().holds_up() {
                    held_up.insert(*sequence);
                }
            }
        }
    }
}

impl Verdict {
    pub(super) const fn charge(&self) -> Option<&Charge> {
        match self {
            Self::Ask(charge) => Some(charge),
            Self::Paid(_)
            | Self::Answered(_)
            | Self::NotStarted { .. }
            | Self::Behind
            | Self::Conflict { .. }
            | Self::TooOld { .. } => None,
        }
    }

    /// The row to write, if the answer makes one.
    pub(super) fn payment_row(&self, event: &OrderConfirmed) -> Option<PaymentRow> {
        let Self::Answered(kept) = self else { return None };
        match &kept.answer {
            Answer::Charged { charge_id } => Some(row(event, PaymentStatus::Charged, Some(charge_id.clone()), kept.attempts)),
            Answer::Declined { .. } => Some(row(event, PaymentStatus::Declined, None, kept.attempts)),
            Answer::Rejected { .. }
            | Answer::Mismatch { .. }
            | Answer::Configuration { .. }
            | Answer::InProgress { .. }
            | Answer::TooMany { .. }
            | Answer::NotReached { .. }
            | Answer::Unavailable { .. }
            | Answer::Unknown { .. } => None,
        }
    }

    /// The outcome, provided that its row could be written.
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Self::Paid(PaymentStatus::Charged) => Outcome::Applied,
            Self::Paid(PaymentStatus::Declined) => Outcome::Declined,
            Self::Answered(kept) => outcome_of(&kept.answer),
            Self::NotStarted { wait } => Outcome::NotStarted { wait: *wait },
            Self::Behind => Outcome::Behind,
            // Asked for and never answered for: as if it had not been reached.
            Self::Ask(_) => Outcome::NotStarted { wait: Duration::ZERO },
            Self::Conflict { error } => Outcome::Conflict { error: error.clone() },
            Self::TooOld { error } => Outcome::Unknown { error: error.clone(), wait: None, parked: true },
        }
    }
}

impl From<Called> for Verdict {
    fn from(called: Called) -> Self {
        match called {
            Called::Answered(kept) => Self::Answered(kept),
            Called::NotStarted { wait } => Self::NotStarted { wait },
            Called::Behind => Self::Behind,
        }
    }
}

fn outcome_of(answer: &Answer) -> Outcome {
    let unknown = |error: &String, wait| Outcome::Unknown { error: error.clone(), wait, parked: false };
    match answer {
        Answer::Charged { .. } => Outcome::Applied,
        Answer::Declined { .. } => Outcome::Declined,
        Answer::Rejected { error } => Outcome::Rejected { error: error.clone() },
        // Asking again cannot help, and a new key could charge twice: a person must look what was charged under this one.
        Answer::Mismatch { error } => Outcome::Unknown { error: error.clone(), wait: None, parked: true },
        Answer::Configuration { wait, .. } | Answer::TooMany { wait } | Answer::NotReached { wait, .. } => {
            Outcome::NotStarted { wait: *wait }
        }
        Answer::InProgress { error, wait } | Answer::Unknown { error, wait, .. } => unknown(error, *wait),
        Answer::Unavailable { error, wait } => unknown(error, Some(*wait)),
    }
}

/// The answer that an attempt's row tells, if it needs no other call: the row could not be written when it came.
fn final_answer(word: Option<&str>, charge_id: Option<String>) -> Option<Answer> {
    match (word, charge_id) {
        (Some(CHARGED), Some(charge_id)) => Some(Answer::Charged { charge_id }),
        (Some("declined"), _) => Some(Answer::Declined { error: "declined at an earlier attempt".to_owned() }),
        _ => None,
    }
}

fn row(event: &OrderConfirmed, status: PaymentStatus, provider_charge_id: Option<String>, attempts: i32) -> PaymentRow {
    let OrderConfirmed { event_id, occurred_at: _, order_id, customer_id, total: amount } = *event;
    PaymentRow { event_id, order_id, customer_id, amount, status, provider_charge_id, attempts }
}

fn pays(payment: &PaymentRow, event: &OrderConfirmed) -> bool {
    (payment.order_id, payment.customer_id, payment.amount) == (event.order_id, event.customer_id, event.total)
}

/// What a payment tells of an event whose claim is forgotten.
pub(super) fn trace(event: &OrderConfirmed, payment: Option<&PaymentRow>) -> Trace {
    match payment {
        None => Trace::None,
        Some(payment) if pays(payment, event) => Trace::Applied,
        Some(_) => Trace::OtherContent,
    }
}

fn same_payment(a: &PaymentRow, b: &PaymentRow) -> bool {
    (a.order_id, a.customer_id, a.amount) == (b.order_id, b.customer_id, b.amount)
}

fn conflict(what: &str) -> Verdict {
    Verdict::Conflict { error: format!("this id {what}") }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::event::{Currency, Money};
    use crate::handler::EventDigest;
    use crate::provider::AmountForm;
    use crate::provider::profile::tests::profile;

    const HOUR: Duration = Duration::from_secs(3600);

    fn event() -> OrderConfirmed {
        let total = Money::from_minor_units(1000, Currency::from_code("EUR").unwrap());
        let occurred_at = chrono::DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        OrderConfirmed { event_id: Uuid::from_u128(7), occurred_at, order_id: 1, customer_id: 2, total }
    }

    fn kept(answer: Answer) -> Kept {
        Kept { answer, digest: event().digest(), body: Arc::from(&b"sent"[..]), unknown_answers: 0, attempts: 1, posted: true }
    }

    fn known() -> KnownAttempt {
        KnownAttempt {
            event_id: event().event_id,
            digest: event().digest(),
            body: Some(b"stored".to_vec()),
            first_attempt_age: HOUR,
            last_attempt_age: HOUR,
            unknown_answers: 0,
            answer: None,
            provider_charge_id: None,
        }
    }

    fn charged() -> Answer {
        Answer::Charged { charge_id: "ch_1".to_owned() }
    }

    fn other_digest() -> EventDigest {
        EventDigest(event().digest().0 ^ 0x100)
    }

    fn judged(kept: Option<Kept>, payment: Option<&PaymentRow>, known: Option<KnownAttempt>) -> Verdict {
        judge(&event(), kept, payment, known, &profile())
    }

    fn every_answer() -> Vec<Answer> {
        let (error, wait) = ("e".to_owned(), Duration::from_secs(3));
        vec![
            charged(),
            Answer::Declined { error: error.clone() },
            Answer::Rejected { error: error.clone() },
            Answer::Mismatch { error: error.clone() },
            Answer::Configuration { error: error.clone(), redirect: false, wait },
            Answer::InProgress { error: error.clone(), wait: Some(wait) },
            Answer::TooMany { wait },
            Answer::NotReached { error: error.clone(), wait },
            Answer::Unavailable { error: error.clone(), wait },
            Answer::Unknown { error, wait: None, served: false },
        ]
    }

    fn ask(verdict: Verdict) -> Charge {
        let Verdict::Ask(charge) = verdict else { panic!("{verdict:?}") };
        charge
    }

    #[test]
    fn an_event_of_which_nothing_is_known_is_asked_for_with_new_bytes() {
        let charge = ask(judged(None, None, None));
        assert_eq!(&*charge.body, br#"{"orderId":1,"amount":10.00,"currency":"EUR"}"#);
        assert_eq!(
            (charge.event_id, charge.key, charge.digest, charge.unknown_before),
            (Uuid::from_u128(7), 1, event().digest(), 0)
        );
    }

    // CASES G04: a release or a setting that would build other bytes changes nothing for a key that has been used.
    #[test]
    fn an_event_that_was_asked_for_before_is_asked_for_with_the_stored_bytes() {
        let minor_units = Profile { amount: AmountForm::MinorUnits, ..profile() };
        let charge = ask(judge(&event(), None, None, Some(KnownAttempt { unknown_answers: 3, ..known() }), &minor_units));
        assert_eq!((&*charge.body, charge.unknown_before), (&b"stored"[..], 3));
        let never_built = ask(judged(None, None, Some(KnownAttempt { body: None, ..known() })));
        assert_eq!(never_built.body, ask(judged(None, None, None)).body);
    }

    #[test]
    fn a_payment_of_the_same_content_is_the_answer_and_of_another_a_conflict() {
        let paid = row_without_provider(&event());
        assert_eq!(judged(None, Some(&paid), Some(known())), Verdict::Paid(PaymentStatus::Charged));
        let declined = PaymentRow { status: PaymentStatus::Declined, ..paid.clone() };
        assert_eq!(judged(None, Some(&declined), None).outcome(), Outcome::Declined);
        let money = |minor_units, code| Money::from_minor_units(minor_units, Currency::from_code(code).unwrap());
        for other in [
            PaymentRow { order_id: 9, ..paid.clone() },
            PaymentRow { customer_id: 9, ..paid.clone() },
            PaymentRow { amount: money(1001, "EUR"), ..paid.clone() },
            PaymentRow { amount: money(1000, "USD"), ..paid },
        ] {
            let verdict = judged(None, Some(&other), None);
            assert!(matches!(verdict.outcome(), Outcome::Conflict { .. }), "{other:?}");
            assert_eq!((verdict.charge(), verdict.payment_row(&event())), (None, None));
        }
    }

    #[test]
    fn nobody_is_asked_behind_an_event_of_its_sequence_that_may_still_be_charged() {
        let unknown = || Verdict::Answered(kept(Answer::unknown("e".to_owned())));
        let asked = || judged(None, None, None);
        let too_old = || judged(None, None, Some(KnownAttempt { first_attempt_age: 1000 * HOUR, ..known() }));
        let paid = || Verdict::Paid(PaymentStatus::Charged);
        let mut verdicts = vec![unknown(), asked(), too_old(), paid(), asked(), asked(), paid(), asked()];
        stand_behind(&mut verdicts, &[1, 1, 2, 2, 2, 3, 4, 4]);
        assert_eq!((&verdicts[1], &verdicts[4]), (&Verdict::Behind, &Verdict::Behind));
        assert_eq!(verdicts[3], paid(), "what is paid is paid");
        let keys: Vec<_> = verdicts.iter().filter_map(Verdict::charge).map(|charge| charge.key).collect();
        assert_eq!(keys, [3, 4]);
        assert_eq!(verdicts[1].outcome(), Outcome::Behind);
    }

    #[test]
    fn an_attempt_or_an_answer_of_another_content_is_a_conflict() {
        let attempt = KnownAttempt { digest: other_digest(), ..known() };
        assert!(matches!(judged(None, None, Some(attempt)), Verdict::Conflict { .. }));
        let answered = Kept { digest: other_digest(), ..kept(charged()) };
        assert!(matches!(judged(Some(answered), None, None), Verdict::Conflict { .. }));
    }

    #[test]
    fn a_kept_answer_is_used_and_only_a_configuration_answer_is_asked_for_again() {
        for answer in every_answer() {
            let configuration = matches!(answer, Answer::Configuration { .. });
            let verdict = judged(Some(kept(answer.clone())), None, None);
            assert_eq!(verdict.charge().is_some(), configuration, "{answer:?}");
            assert!(configuration || verdict == Verdict::Answered(kept(answer)));
        }
    }

    // CASES G03, as far as asking goes.
    #[test]
    fn a_key_that_may_be_forgotten_is_never_posted_again() {
        let aged = |age| judged(None, None, Some(KnownAttempt { first_attempt_age: age, ..known() }));
        ask(aged(23 * HOUR - Duration::from_millis(1)));
        for age in [23 * HOUR, 24 * HOUR, 10_000 * HOUR] {
            let verdict = aged(age);
            assert!(matches!(verdict.outcome(), Outcome::Unknown { parked: true, wait: None, .. }), "{verdict:?}");
            assert_eq!((verdict.charge(), verdict.payment_row(&event())), (None, None));
        }
    }

    // CASES G03
    #[test]
    fn a_provider_that_can_be_asked_is_asked_before_a_key_that_may_be_forgotten_is_posted() {
        let asks = Profile { query: ProviderQuery::IdempotencyKey, query_settle: HOUR, ..profile() };
        let find_first = |first, last| {
            let known = KnownAttempt { first_attempt_age: first, last_attempt_age: last, ..known() };
            ask(judge(&event(), None, None, Some(known), &asks)).find_first
        };
        assert_eq!(find_first(22 * HOUR, 22 * HOUR), None, "the key is known");
        assert_eq!(find_first(23 * HOUR, 22 * HOUR), Some(Duration::ZERO));
        assert_eq!(find_first(23 * HOUR, HOUR / 4), Some(HOUR * 3 / 4));
        assert_eq!(ask(judge(&event(), None, None, None, &asks)).find_first, None, "never asked for");
    }

    #[test]
    fn an_attempt_that_was_only_ever_refused_is_posted_again_however_old() {
        let old = |answer: &str, unknown_answers| {
            let first_attempt_age = 1000 * HOUR;
            judged(
                None,
                None,
                Some(KnownAttempt { answer: Some(answer.to_owned()), first_attempt_age, unknown_answers, ..known() }),
            )
        };
        for refusal in ["rejected", "configuration"] {
            assert!(old(refusal, 0).charge().is_some(), "{refusal}");
            assert_eq!(old(refusal, 1).charge(), None, "{refusal} after an unknown answer");
        }
        assert_eq!(old("charged", 0).charge(), None, "charged under a name that was not told");
    }

    #[test]
    fn an_attempt_that_knows_its_answer_writes_the_row_and_calls_nobody_however_old() {
        let old = |answer: &str, charge_id: Option<&str>| KnownAttempt {
            answer: Some(answer.to_owned()),
            provider_charge_id: charge_id.map(str::to_owned),
            first_attempt_age: 1000 * HOUR,
            unknown_answers: 2,
            ..known()
        };
        let verdict = judged(None, None, Some(old("charged", Some("ch_1"))));
        let expected = row(&event(), PaymentStatus::Charged, Some("ch_1".to_owned()), 3);
        assert_eq!(verdict.payment_row(&event()), Some(expected));
        let verdict = judged(None, None, Some(old("declined", None)));
        assert_eq!(verdict.payment_row(&event()).map(|row| row.status), Some(PaymentStatus::Declined));
        assert!(matches!(judged(None, None, Some(old("unknown", None))), Verdict::TooOld { .. }));
        assert!(matches!(judged(None, None, Some(old("charged", None))), Verdict::TooOld { .. }), "an id is the proof");
    }

    #[test]
    fn the_words_in_the_attempts_row_are_those_that_are_read_back() {
        for answer in every_answer() {
            let begun = begun_attempt(Uuid::from_u128(7), kept(answer.clone())).unwrap();
            let told = final_answer(begun.answer.as_deref(), begun.provider_charge_id);
            let class = told.as_ref().map(Answer::class);
            assert_eq!(class, matches!(answer.class(), "charged" | "declined").then_some(answer.class()));
        }
    }

    #[test]
    fn a_question_is_no_attempt_but_what_it_found_is_kept() {
        for answer in every_answer() {
            let asked = Kept { posted: false, ..kept(answer.clone()) };
            let begun = begun_attempt(Uuid::from_u128(7), asked);
            assert_eq!(begun.and_then(|begun| begun.provider_charge_id).is_some(), answer.class() == "charged");
        }
    }

    // An unknown outcome is never "not charged".
    #[test]
    fn every_answer_has_one_outcome() {
        let wait = Duration::from_secs(3);
        let unknown = |wait, parked| Outcome::Unknown { error: "e".to_owned(), wait, parked };
        let outcomes: Vec<_> = every_answer().into_iter().map(|answer| Verdict::Answered(kept(answer)).outcome()).collect();
        let expected = [
            Outcome::Applied,
            Outcome::Declined,
            Outcome::Rejected { error: "e".to_owned() },
            unknown(None, true),
            Outcome::NotStarted { wait },
            unknown(Some(wait), false),
            Outcome::NotStarted { wait },
            Outcome::NotStarted { wait },
            unknown(Some(wait), false),
            unknown(None, false),
        ];
        assert_eq!(outcomes, expected);
    }

    #[test]
    fn only_charged_and_declined_make_a_row() {
        for answer in every_answer() {
            let row = Verdict::Answered(kept(answer.clone())).payment_row(&event());
            let status = row.as_ref().map(|row| row.status.as_str());
            assert_eq!(status, matches!(answer.class(), "charged" | "declined").then_some(answer.class()));
            assert!(row.is_none_or(|row| pays(&row, &event()) && row.attempts == 1));
        }
    }

    #[test]
    fn a_row_in_the_way_is_compared() {
        let ours = row(&event(), PaymentStatus::Charged, Some("ch_1".to_owned()), 1);
        let declined = PaymentRow { status: PaymentStatus::Declined, provider_charge_id: None, ..ours.clone() };
        assert_eq!(compare(&ours, Some(&PaymentRow { provider_charge_id: None, attempts: 0, ..ours.clone() })), Outcome::Applied);
        assert_eq!(compare(&declined, Some(&ours)), Outcome::Applied, "the row is the truth");
        assert_eq!(compare(&declined, Some(&declined)), Outcome::Declined);
        let other = PaymentRow { order_id: 9, ..ours.clone() };
        let uncalled = row_without_provider(&event());
        assert!(matches!(compare(&uncalled, Some(&other)), Outcome::Conflict { .. }));
        assert_eq!(compare(&uncalled, Some(&ours)), Outcome::Applied);
        for theirs in [None, Some(&other), Some(&declined)] {
            let outcome = compare(&ours, theirs);
            assert!(matches!(&outcome, Outcome::NotRecorded { charge_id, .. } if charge_id == "ch_1"), "{outcome:?}");
        }
        assert!(matches!(compare(&declined, None), Outcome::Unknown { parked: true, .. }));
    }

    #[test]
    fn an_event_whose_row_is_refused_is_held_by_what_was_answered() {
        let outcome = |answer| refused(answer, "no");
        assert_eq!(outcome(None), Outcome::Refused { error: "no".to_owned() });
        for answer in every_answer() {
            let unknown = answer.is_unknown();
            match (answer.class(), outcome(Some(kept(answer)))) {
                ("charged", Outcome::NotRecorded { error, charge_id }) => assert!(error.contains(&charge_id)),
                ("charged", other) => panic!("{other:?}"),
                (_, Outcome::Unknown { parked: true, wait: None, .. }) => assert!(unknown),
                (class, other) => assert!(matches!(other, Outcome::Refused { .. }) && !unknown, "{class}: {other:?}"),
            }
        }
    }
}
