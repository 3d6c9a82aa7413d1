//! Histories drawn from a seed, on the real thing: engines are processes, Kafka and PostgreSQL are real, the provider lies. What the
//! simulation plays with the machines alone by the hundred thousand is played here with everything around them.
//!
//! The checker is the one of all tests: in the end one charge, one row and one claim for each event, and every offset passed. A history
//! that fails tells its seed and its steps; `ONCEWARD_SIMULATION_SEED` runs that one alone.

use std::collections::BTreeSet;

use onceward::lab::process::Signal;
use onceward::lab::provider_stub::{Act, Reply, Rule};
use onceward::produce::draw::Draw;

use crate::support::{Engine, Message, Order, Proxy, World, assert_the_books_agree, eventually_equal, times};

const STEPS: usize = 25;
const PARTITIONS: i32 = 4;
/// Engines at once.
const ENGINES: usize = 3;

#[test]
fn whatever_happens_to_them_each_event_is_charged_once() {
    let seeds = match std::env::var("ONCEWARD_SIMULATION_SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => (1..=times(2, 40) as u64).collect(),
    };
    let mut met = BTreeSet::new();
    for seed in seeds {
        println!("seed {seed}");
        // Half of them ask nobody, one transaction at a time: then partitions share it.
        let mut history = History::new(seed, seed % 2 == 0);
        for _ in 0..STEPS {
            let step = history.step();
            println!("  {step}");
            met.insert(step);
        }
        history.comes_to_rest();
    }
    println!("met: {met:?}");
}

struct History {
    draw: Draw,
    world: World,
    way: Proxy,
    engines: Vec<Running>,
    orders: Vec<Order>,
    asks_nobody: bool,
}

struct Running {
    engine: Engine,
    is_frozen: bool,
}

impl History {
    fn new(seed: u64, asks_nobody: bool) -> Self {
        let world = World::with_partitions(PARTITIONS);
        let way = Proxy::before(&world.database);
        let mut history = Self { draw: Draw::new(seed), world, way, engines: Vec::new(), orders: Vec::new(), asks_nobody };
        history.start();
        history
    }

    /// The next thing happens. Out: its name.
    fn step(&mut self) -> &'static str {
        match self.below(13) {
            0..=3 => self.deliver(),
            4 | 5 => self.redeliver(),
            6 if self.engines.len() < ENGINES => self.start(),
            7 => self.kill(),
            8 => self.stop(),
            9 => self.freeze_or_thaw(),
            10 => self.break_the_way(),
            11 => self.lie(),
            12 => self.replay(),
            _ => self.settle(),
        }
    }

    fn deliver(&mut self) -> &'static str {
        let orders = Order::some(1 + self.below(40));
        self.world.topic.send(orders.iter().map(Order::message));
        self.orders.extend(orders);
        "new events"
    }

    fn redeliver(&mut self) -> &'static str {
        let elsewhere = self.below(2) == 0;
        let again: Vec<Message> = (0..self.below(30).min(self.orders.len()))
            .map(|_| {
                let order = self.below(self.orders.len());
                let message = self.orders[order].message();
                if elsewhere { message.partition(self.below(PARTITIONS as usize) as i32) } else { message }
            })
            .collect();
        self.world.topic.send(again);
        if elsewhere { "events again, in other partitions" } else { "events again" }
    }

    fn start(&mut self) -> &'static str {
        let engine = self.world.engine().set("database.url", self.way.url());
        let engine = if self.asks_nobody { engine.without_provider().concurrency(1) } else { engine }.launch();
        self.engines.push(Running { engine, is_frozen: false });
        "a process starts"
    }

    fn kill(&mut self) -> &'static str {
        let Some(victim) = self.any() else { return "nobody is there to be killed" };
        self.engines.swap_remove(victim).engine.kill();
        "a process is killed"
    }

    /// It ends by itself, whatever is away.
    fn stop(&mut self) -> &'static str {
        let Some(leaving) = self.any() else { return "nobody is there to leave" };
        let mut leaving = self.engines.swap_remove(leaving);
        if leaving.is_frozen {
            leaving.engine.signal(Signal::Continue);
        }
        leaving.engine.terminate();
        "a process leaves"
    }

    fn freeze_or_thaw(&mut self) -> &'static str {
        let Some(one) = self.any() else { return "nobody is there to be frozen" };
        let one = &mut self.engines[one];
        one.is_frozen = !one.is_frozen;
        one.engine.signal(if one.is_frozen { Signal::Stop } else { Signal::Continue });
        if one.is_frozen { "a process is frozen" } else { "a process thaws" }
    }

    fn break_the_way(&mut self) -> &'static str {
        match self.below(5) {
            0 => self.way.refuse(),
            1 => self.way.fall_silent(),
            2 => self.way.lose_the_next_commit(false),
            3 => self.way.lose_the_next_commit(true),
            _ => self.way.open(),
        }
        "the way to the database changes"
    }

    fn lie(&mut self) -> &'static str {
        let act = match self.below(6) {
            0 => Act::Close { charge: true, reset: false },
            1 => Act::Close { charge: false, reset: true },
            2 => Act::HalfAnswer,
            3 => Act::Silence { charge: true },
            4 => Act::InProgress,
            _ => Act::Reply(Reply { status: 503, ..Reply::default() }),
        };
        let seed = self.below(1_000) as u64;
        self.world.provider.script([Rule::for_share(300, seed, act)]);
        "the provider lies in another way"
    }

    /// Everybody leaves and all is read once more.
    fn replay(&mut self) -> &'static str {
        while !self.engines.is_empty() {
            self.stop();
        }
        self.world.topic.reset_to_the_beginning(&self.world.group);
        self.start();
        "the group is set back to the beginning"
    }

    /// Everything works again, and what there is comes to an end.
    fn settle(&mut self) -> &'static str {
        self.way.open();
        for running in self.engines.iter_mut().filter(|running| running.is_frozen) {
            running.engine.signal(Signal::Continue);
            running.is_frozen = false;
        }
        if self.engines.is_empty() {
            self.start();
        }
        let (topic, group) = (&self.world.topic, &self.world.group);
        eventually_equal("every record is settled and committed", 0, || topic.lag(group));
        "all is settled"
    }

    fn comes_to_rest(mut self) {
        self.world.provider.clear_script();
        self.settle();
        if self.asks_nobody {
            let rows = |table: &str| self.world.database.count(&format!("SELECT count(*) FROM {table}"));
            let counts = ["payment", "processed_event", "held_event"].map(rows);
            let orders = i64::try_from(self.orders.len()).expect("not so many");
            assert_eq!((counts, self.world.provider.calls().posts), ([orders, orders, 0], 0), "payments, claims, held; calls");
        } else {
            assert_the_books_agree(&self.world, &self.world.provider, &self.orders);
        }
        for Running { engine, .. } in self.engines {
            assert!(engine.terminate().success());
        }
    }

    fn any(&mut self) -> Option<usize> {
        Some(self.engines.len()).filter(|there| *there > 0).map(|there| self.below(there))
    }

    fn below(&mut self, limit: usize) -> usize {
        self.draw.below(limit as u64) as usize
    }
}
