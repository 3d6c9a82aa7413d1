//! Processes join, leave, are killed and frozen, one after the other and on top of each other, while orders arrive, some of them twice.
//! Every rebalance is a moment in which two processes may hold the same record; a storm of them is where engines lose events or apply
//! them twice. A seed decides what happens; it stands in the name of what failed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use onceward::lab::process::Signal;

use crate::support::{Engine, Order, RaisedAtTheEnd, World, assert_the_books_agree, eventually};

const PARTITIONS: i32 = 6;
const STEPS: usize = 9;
const MEMBERS: usize = 4;

// CASES I11, I05, A03, B05, B12
#[test]
fn with_cooperative_sticky() {
    storm("cooperative-sticky", 0x5eed_0001);
}

// CASES I11, I05, A03, B05
#[test]
fn with_range() {
    storm("range", 0x5eed_0002);
}

// CASES I11, B03
#[test]
fn with_the_brokers_own_assignor() {
    storm("broker", 0x5eed_0003);
}

struct Member {
    engine: Engine,
    frozen: bool,
}

fn storm(assignor: &str, seed: u64) {
    let world = World::with_partitions(PARTITIONS);
    let start = || Member { engine: world.engine().assignor(assignor).launch(), frozen: false };
    let over = AtomicBool::new(false);
    let mut chance = Chance(seed);
    let orders = thread::scope(|scope| {
        let end = RaisedAtTheEnd(&over);
        let sender = scope.spawn(|| send_until(&over, &world));
        let mut members = vec![start(), start()];
        settles_more(&world, "two members work");
        let mut happened = Vec::new();
        for _ in 0..STEPS {
            happened.push(happen(&mut members, &mut chance, &start));
            settles_more(&world, &format!("{assignor}, seed {seed:#x}: {}", happened.join(", ")));
        }
        members.iter_mut().for_each(thaw);
        drop(end);
        let orders = sender.join().expect("it sends");
        assert_the_books_agree(&world, &world.provider, &orders);
        for member in members {
            assert!(member.engine.terminate().success(), "{assignor}, seed {seed:#x}: {}", happened.join(", "));
        }
        orders
    });
    assert!(orders.len() > 100, "{}", orders.len());
    assert_eq!(world.provider.calls().bodies_changed, 0);
}

/// One thing happens. At least one member is left at work.
fn happen(members: &mut Vec<Member>, chance: &mut Chance, start: &impl Fn() -> Member) -> &'static str {
    let those = |frozen: bool| (0..members.len()).filter(|index| members[*index].frozen == frozen).collect::<Vec<_>>();
    let (at_work, frozen) = (those(false), those(true));
    match chance.below(5) {
        0 if at_work.len() > 1 => {
            let leaves = members.remove(chance.one_of(&at_work));
            assert!(leaves.engine.terminate().success());
            "one leaves"
        }
        1 if at_work.len() > 1 => {
            members.remove(chance.one_of(&at_work)).engine.kill();
            "one is killed"
        }
        2 if at_work.len() > 1 => {
            let member = &mut members[chance.one_of(&at_work)];
            member.engine.signal(Signal::Stop);
            member.frozen = true;
            "one is frozen"
        }
        3 if !frozen.is_empty() => {
            thaw(&mut members[chance.one_of(&frozen)]);
            "one thaws"
        }
        _ if members.len() < MEMBERS => {
            members.push(start());
            "one joins"
        }
        _ => "nothing",
    }
}

fn thaw(member: &mut Member) {
    if std::mem::take(&mut member.frozen) {
        member.engine.signal(Signal::Continue);
    }
}

/// Whatever happened, somebody goes on.
fn settles_more(world: &World, what: &str) {
    let settled = || world.database.count("SELECT count(*) FROM payment");
    let before = settled();
    eventually(what, || settled() > before + 10);
}

/// Orders in all partitions without a pause; every fifth is sent again, elsewhere.
fn send_until(over: &AtomicBool, world: &World) -> Vec<Order> {
    let mut sent: Vec<Order> = Vec::new();
    while !over.load(Ordering::Acquire) {
        let orders = Order::some(5);
        let again = sent.last().map(|order| order.message().partition(0));
        world.topic.send(orders.iter().zip(1..).map(|(order, partition)| order.message().partition(partition)).chain(again));
        sent.extend(orders);
    }
    sent
}

/// A small generator, so that a seed means the same for ever.
struct Chance(u64);

impl Chance {
    fn one_of(&mut self, of: &[usize]) -> usize {
        of[self.below(of.len())]
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).expect("below the bound")
    }
}
