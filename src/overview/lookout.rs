//! What viewers look at: asked once for all of them, and never waited for.
//!
//! In: looks, as many as there are. Out: the newest answers. It owns the questions that are on their way; each is asked again when somebody
//! looks and the answer has grown old, by one task at a time. If that dies, the next look asks again.
//!
//! Invariant: however many look, the database and the broker get one question at a time, and nobody who looks waits for a server that is
//! silent.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, watch};
use tokio::time::timeout;

use super::{Known, Logs, Overview};
use crate::config::Config;
use crate::pipeline::broker;
use crate::pipeline::client::Client;
use crate::retention::cleaner::{self, Outlook};
use crate::retention::memory::Own;
use crate::status::Status;
use crate::store::overview::{self, Group};
use crate::store::{DbError, Pool};

/// For how long an answer is good: of the database, of the broker, about retention, about the topic's settings.
const GROUP: Duration = Duration::from_secs(1);
const LOGS: Duration = Duration::from_secs(3);
const OUTLOOK: Duration = Duration::from_secs(30);
const OWN: Duration = Duration::from_secs(600);
/// A server that has not answered for so long is told to be silent.
const SILENT: Duration = Duration::from_secs(4);
/// The first look waits for so long.
const FIRST: Duration = Duration::from_secs(1);

/// A question and its newest answer.
#[derive(Debug)]
struct Fact<T> {
    known: watch::Sender<(Option<Instant>, Known<T>)>,
    /// Held while it is asked.
    asking: Arc<Mutex<()>>,
    good_for: Duration,
}

/// Everything that is looked at, and whom to ask.
#[derive(Clone, Debug)]
pub(crate) struct Lookout {
    config: Arc<Config>,
    pool: Pool,
    client: Arc<OnceLock<Client>>,
    status: Status,
    group: Arc<Fact<Group>>,
    logs: Arc<Fact<Logs>>,
    outlook: Arc<Fact<Outlook>>,
    own: Arc<Fact<Own>>,
}

impl<T: 'static> Fact<T> {
    fn good_for(good_for: Duration) -> Arc<Self> {
        Arc::new(Self { known: watch::Sender::new((None, Known::default())), asking: Arc::default(), good_for })
    }

    /// The newest answer. Asks for the next one when it is old; only the first is waited for, a moment. To be called on a runtime of actix.
    async fn look<F>(self: &Arc<Self>, ask: impl FnOnce() -> F) -> Known<T>
    where
        F: Future<Output = Result<T, String>> + 'static,
    {
        let (mut news, asked) = (self.known.subscribe(), self.known.borrow().0);
        if asked.is_none_or(|asked| asked.elapsed() >= self.good_for)
            && let Ok(asking) = Arc::clone(&self.asking).try_lock_owned()
        {
            let (fact, answer) = (Arc::clone(self), ask());
            actix_web::rt::spawn(async move {
                let begun = Instant::now();
                let answer = timeout(SILENT, answer).await;
                fact.take(begun, answer.unwrap_or_else(|_| Err(format!("no answer for {} s", SILENT.as_secs()))));
                drop(asking);
            });
        }
        if asked.is_none() {
            let _ = timeout(FIRST, news.changed()).await; // then it is shown as not known yet
        }
        self.known.borrow().1.clone()
    }

    fn take(&self, begun: Instant, answer: Result<T, String>) {
        let newest = Known::just_now(answer, begun.elapsed());
        self.known.send_modify(|(asked, known)| {
            let answer = newest.answer.or(known.answer.take());
            (*asked, *known) = (Some(Instant::now()), Known { answer, ..newest });
        });
    }
}

impl Lookout {
    /// One that asks the database through this pool, and the broker through the engine's own client once that is there.
    pub(crate) fn new(config: Arc<Config>, pool: Pool, client: Arc<OnceLock<Client>>, status: Status) -> Self {
        Self {
            config,
            pool,
            client,
            status,
            group: Fact::good_for(GROUP),
            logs: Fact::good_for(LOGS),
            outlook: Fact::good_for(OUTLOOK),
            own: Fact::good_for(OWN),
        }
    }

    /// What there is to see now.
    pub(crate) async fn look(&self) -> Overview {
        let (group, logs, own) = tokio::join!(
            self.group.look(|| self.ask_group()),
            self.logs.look(|| self.ask_logs()),
            self.own.look(|| self.ask_own())
        );
        let outlook = match own.answer {
            Some((_, own)) => self.outlook.look(|| self.ask_outlook(own)).await,
            None => Known { answer: None, error: own.error, took: own.took },
        };
        Overview::of(&self.config.kafka, (group, logs, outlook), &self.status.snapshot())
    }

    fn ask_group(&self) -> impl Future<Output = Result<Group, String>> + 'static {
        let (pool, config) = (self.pool.clone(), Arc::clone(&self.config));
        async move {
            let mut session = pool.get().await.map_err(|error| DbError::from(error).to_string())?;
            let group = overview::group(&mut session, &config.kafka.group, &config.kafka.topic).await;
            group.map_err(|error| error.to_string())
        }
    }

    fn ask_logs(&self) -> impl Future<Output = Result<Logs, String>> + 'static {
        let (client, topic) = (self.client.get().cloned(), self.config.kafka.topic.clone());
        async move {
            let client = client.ok_or("the engine has not started yet")?;
            broker::ask(&client, &topic, broker::all_logs).await
        }
    }

    fn ask_own(&self) -> impl Future<Output = Result<Own, String>> + 'static {
        let config = Arc::clone(&self.config);
        async move { Own::of(&config).await }
    }

    fn ask_outlook(&self, own: Arc<Own>) -> impl Future<Output = Result<Outlook, String>> + 'static {
        let pool = self.pool.clone();
        async move {
            let mut session = pool.get().await.map_err(|error| DbError::from(error).to_string())?;
            cleaner::look(&mut session, &own).await.map_err(|error| error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn many_looks_are_one_question_and_a_silent_server_makes_nobody_wait() {
        actix_web::rt::System::new().block_on(async {
            let (fact, asked) = (Fact::good_for(Duration::from_secs(60)), Cell::new(0));
            let ask = || {
                asked.set(asked.get() + 1);
                std::future::ready(Ok(asked.get()))
            };
            assert_eq!(fact.look(ask).await.get(), Some(&1));
            assert_eq!(fact.look(ask).await.get(), Some(&1), "it is still good");
            assert_eq!(asked.get(), 1);

            let fact = Fact::good_for(Duration::ZERO);
            assert_eq!(fact.look(|| std::future::ready(Ok(1))).await.get(), Some(&1));
            for _ in 0..2 {
                let seen = fact.look(std::future::pending::<Result<i32, String>>).await;
                assert_eq!(seen.get(), Some(&1), "what is known is shown");
            }
        });
    }

    #[test]
    fn a_question_that_fails_leaves_the_last_answer_and_says_so() {
        actix_web::rt::System::new().block_on(async {
            let fact = Fact::good_for(Duration::ZERO);
            assert_eq!(fact.look(|| std::future::ready(Ok(7))).await.error, None);
            let seen = loop {
                let seen = fact.look(|| std::future::ready(Err("away".to_owned()))).await;
                if seen.error.is_some() {
                    break seen;
                }
                tokio::task::yield_now().await;
            };
            assert_eq!((seen.get(), seen.error.as_deref()), (Some(&7), Some("away")));
        });
    }
}
