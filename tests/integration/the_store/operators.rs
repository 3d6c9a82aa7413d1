//! What operators decide counts once, is recorded with who and why, and is known to whoever owns the partition next.

use onceward::actions::{ActionError, By, Desk};
use onceward::held::Request;
use onceward::record::{NextOffset, Offset, Record};
use onceward::store::consumed_partitions::{bump, fence, rebump};
use onceward::store::held_events::{HeldState, NewHeld, hold};
use onceward::store::held_requests::wanted;
use onceward::store::operator_actions::Decided;
use onceward::store::{Session, Store};

use super::{Db, GROUP, TOPIC, advance, committed, own};

const ANN: By<'static> = By { actor: "ann", reason: "it looks odd" };
const BOB: By<'static> = By { actor: "bob", reason: "seen with the bank" };

fn desk(store: &Store) -> Desk<'_> {
    Desk { store, group: GROUP, topic: TOPIC }
}

fn why_not<T: std::fmt::Debug>(result: Result<T, ActionError>) -> String {
    match result {
        Err(ActionError::Refused(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_pause_takes_the_epoch_and_is_found_by_every_owner_until_it_is_resumed() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    assert!(why_not(desk(&store).pause(0, ANN).await).contains("ever owned"));
    let (source, epoch) = own(&mut s, 0).await;
    desk(&store).pause(0, ANN).await.unwrap();
    let changed = async |s: &mut Session| wanted(s, (GROUP, TOPIC), &[0, 1]).await.unwrap();
    assert_eq!(changed(&mut s).await, [(0, true)], "an owner that is idle sees it so");
    assert_eq!(committed(&mut s, async |s| fence(s, source, epoch).await).await, None, "no batch begins any more");
    for _ in 0..2 {
        let paused = bump(&mut s, GROUP, TOPIC, 0, "next").await.unwrap().paused.expect("it is paused");
        assert_eq!(paused.to_string(), "by ann: it looks odd");
    }
    assert_eq!(changed(&mut s).await, [], "whoever has taken it over knows");
    assert_eq!(why_not(desk(&store).pause(0, BOB).await), "partition 0 is paused already, by ann: it looks odd");

    desk(&store).resume(0, BOB).await.unwrap();
    let ownership = bump(&mut s, GROUP, TOPIC, 0, "next").await.unwrap();
    assert_eq!(ownership.paused, None);
    assert_eq!(why_not(desk(&store).resume(0, BOB).await), "partition 0 is not paused");
    let again = rebump(&mut s, source, ownership.epoch, "next").await.unwrap();
    assert!(again.is_some(), "what is refused changes nothing");
}

#[tokio::test]
async fn a_record_is_held_from_the_frontier_on_and_once() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, epoch) = own(&mut s, 0).await;
    let record = |offset| Record {
        partition: 0,
        offset: Offset(offset),
        timestamp_ms: None,
        key: None,
        headers: Box::default(),
        payload: Some(b"x"[..].into()),
    };
    let (of_two, of_four) = (record(2), record(4));
    let row = |record| NewHeld {
        record,
        digest: of_two.digest(),
        event_id: None,
        reason: onceward::handler::HeldReason::Rejected,
        error: "no",
        state: HeldState::Parked,
        owns_claim: true,
        provider_charge_id: None,
        attempts: 1,
        next_attempt_in: None,
    };
    committed(&mut s, async |s| {
        fence(s, source, epoch).await?.expect("ours");
        hold(s, source, &[row(&of_two)]).await?;
        advance(s, source, epoch, NextOffset(3), None, None);
        Ok(())
    })
    .await;
    let refused = async |offset| why_not(desk(&store).hold(0, Offset(offset), ANN).await);
    assert!(refused(-1).await.contains("no offset"));
    let settled = refused(0).await;
    assert!(settled.contains("settled, for everything below 3 is"), "{settled}");
    let held = refused(2).await;
    assert!(held.contains("is held already, as number 1 (rejected, parked)"), "{held}");

    for offset in [3, 4] {
        desk(&store).hold(0, Offset(offset), ANN).await.unwrap();
    }
    assert!(refused(3).await.contains("is to be held by ann: it looks odd"));
    assert_eq!(committed(&mut s, async |s| fence(s, source, epoch).await).await, None, "no batch begins that does not know");
    let holds = bump(&mut s, GROUP, TOPIC, 0, "next").await.unwrap().holds;
    let words = || "held by ann: it looks odd".to_owned();
    assert_eq!(holds.into_iter().collect::<Vec<_>>(), [(Offset(3), words()), (Offset(4), words())]);

    desk(&store).skip(0, (NextOffset(5), NextOffset(7)), BOB).await.unwrap();
    assert!(refused(6).await.contains("passed over"));
    committed(&mut s, async |s| hold(s, source, &[NewHeld { digest: of_four.digest(), ..row(&of_four) }]).await).await;
    let decided = desk(&store).decided(None, None, 10).await.unwrap();
    let [skip, four, three] = &decided[..] else { panic!("{decided:?}") };
    assert_eq!((&*skip.action, skip.offset, skip.to), ("skip", Some(Offset(5)), Some(NextOffset(7))));
    assert_eq!((four.offset, four.held, three.offset, three.held), (Some(Offset(4)), Some(3), Some(Offset(3)), None));
    assert_eq!(desk(&store).decided(Some(0), Some(four.id), 10).await.unwrap(), decided[2..]);
    assert_eq!(desk(&store).decided(Some(1), None, 10).await.unwrap(), []);
}

#[tokio::test]
async fn what_is_asked_for_of_held_events_is_recorded_and_what_is_refused_is_not() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let record = Record {
        partition: 0,
        offset: Offset(7),
        timestamp_ms: None,
        key: None,
        headers: Box::default(),
        payload: Some(b"x"[..].into()),
    };
    let row = NewHeld {
        record: &record,
        digest: record.digest(),
        event_id: None,
        reason: onceward::handler::HeldReason::Operator,
        error: "held by ann: it looks odd",
        state: HeldState::Parked,
        owns_claim: false,
        provider_charge_id: None,
        attempts: 0,
        next_attempt_in: None,
    };
    committed(&mut s, async |s| hold(s, source, &[row]).await).await;
    let nameless = By { actor: " ", ..BOB };
    assert!(why_not(desk(&store).request(&[1], &Request::Replay, nameless).await).contains("the actor is missing"));
    assert!(why_not(desk(&store).pause(0, By { reason: "", ..BOB }).await).contains("the reason is missing"));
    let resolve = desk(&store).request(&[1, 2], &Request::NotCharged, BOB).await.unwrap();
    assert!(resolve.len() == 1 && resolve[0].refused.is_some(), "{resolve:?}");
    let replay = desk(&store).request(&[1], &Request::Replay, BOB).await.unwrap();
    assert_eq!(replay[0].refused, None);
    let twice = desk(&store).request(&[1], &Request::Discard, ANN).await.unwrap();
    assert_eq!(twice[0].refused.as_deref(), Some("replay is asked for already"));
    let decided = desk(&store).decided(None, None, 10).await.unwrap();
    let [Decided { actor, action, partition: 0, offset: Some(Offset(7)), held: Some(1), reason, .. }] = &decided[..] else {
        panic!("{decided:?}")
    };
    assert_eq!((&**actor, &**action, &**reason), ("bob", "replay", "seen with the bank"));
}
