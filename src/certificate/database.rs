//! What PostgreSQL is asked.
//!
//! In: a session. Out: answers about the server, our role and the tables. Each question stands for itself: one that fails leaves its
//! own conditions open and no others.
//!
//! Invariant: a setting is judged by what it is for our own sessions.

use std::fmt::Display;
use std::net::IpAddr;

use tokio_postgres::config::Host;

use super::tables::{self, Made};
use super::{Answers, Condition, session};
use crate::config::Config;
use crate::event::id::{DAY_MS, day_of, day_text, first_id_of_day, unix_ms};
use crate::retention::sweeper::CREATE_INDEX;
use crate::store::conditions::{self, Memory, Settings};
use crate::store::old_claims::{self, PlainTable};
use crate::store::{self, DatabaseUrl, Encryption, PooledSession, Session, retention};
use crate::tls::{Tls, Trust};

/// Multiranges, and a DETACH that locks nobody out.
const OLDEST_SERVER: i32 = 140_000;
/// How a server or database that need not survive a crash says so.
const ACCEPTED: &str =
    "or say in the database that it need not survive a crash: ALTER DATABASE … SET onceward.no_fsync = 'accepted'";

/// Whether anybody on the way can read what we say, or answer in the server's place.
fn encryption(config: &Config, answers: &mut Answers) {
    let Ok(DatabaseUrl { config: url, encryption }) = DatabaseUrl::parse(config.database.url.expose()) else { return };
    let found = match encryption {
        Encryption::Always(Tls { trust: Trust::Name(_), .. }) => Ok("verify-full"),
        Encryption::Always(Tls { trust: Trust::Issuer(_), .. }) => Ok("verify-ca"),
        _ if is_of_this_machine(&url) => Ok("of this machine"),
        Encryption::Always(Tls { trust: Trust::Anyone, .. }) => Err("it is encrypted, and whoever answers is believed"),
        Encryption::IfOffered(_) => Err("it is encrypted only if the server says that it can, and whoever answers is believed"),
        Encryption::Never => Err("it is in plain text"),
    };
    let todo = "add sslmode=verify-full and sslrootcert to database.url";
    answers.judged(Condition::DatabaseTls, found.map(str::to_owned).map_err(|found| (found.to_owned(), todo)));
}

fn is_of_this_machine(url: &tokio_postgres::Config) -> bool {
    let is_near = |address: &IpAddr| address.is_loopback();
    match url.get_hostaddrs() {
        [] => url.get_hosts().iter().all(|host| match host {
            Host::Unix(_) => true,
            Host::Tcp(name) => name == "localhost" || name.parse().is_ok_and(|address| is_near(&address)),
        }),
        addresses => addresses.iter().all(is_near),
    }
}

/// A connection; none when the database does not answer as it must.
pub(super) async fn connect(config: &Config, answers: &mut Answers) -> Option<PooledSession> {
    encryption(config, answers);
    let url = config.database.url.redacted_url();
    match session(config).await {
        Ok(session) => {
            answers.holds(Condition::Database, format_args!("{url} takes writes"));
            Some(session)
        }
        Err(error) => {
            answers.fails(
                Condition::Database,
                format_args!("{url}: {error}"),
                "see database.url; it must be the primary, writable for our role (default_transaction_read_only), in UTF8",
            );
            None
        }
    }
}

/// Asks everything.
pub(super) async fn ask(config: &Config, s: &mut Session, answers: &mut Answers) {
    match conditions::settings(s).await {
        Ok(settings) => judge_settings(&settings, answers),
        Err(error) => not_asked(answers, &SETTINGS, error),
    }
    match store::schema_is_current(s).await {
        Ok(true) => {
            answers.holds(Condition::Schema, "every migration is applied");
            privileges(s, answers).await;
        }
        Ok(false) => {
            answers.fails(Condition::Schema, "migrations are missing", "run `onceward migrate`");
            answers.not_asked(Condition::Privileges, "migrations are missing");
        }
        Err(error) => not_asked(answers, &[Condition::Schema, Condition::Privileges], error),
    }
    let made = tables::ask(config, s, answers).await;
    match made {
        Some(Made::ByDay) => answers.does_not_apply(Condition::OldClaims, "days are dropped whole"),
        Some(Made::Plain) => plain_table(s, answers).await,
        Some(Made::Otherwise) => answers.does_not_apply(Condition::OldClaims, "processed_event is partitioned in another way"),
        None => answers.not_asked(Condition::OldClaims, "processed_event could not be looked at"),
    }
    memory(config, s, made, answers).await;
}

async fn privileges(s: &mut Session, answers: &mut Answers) {
    match conditions::missing_privileges(s).await {
        Ok(missing) if missing.is_empty() => answers.holds(Condition::Privileges, "our role has what it needs"),
        Ok(missing) => answers.fails(
            Condition::Privileges,
            format_args!("our role lacks {}", missing.join(", ")),
            "GRANT them, or let our role own the tables",
        ),
        Err(error) => not_asked(answers, &[Condition::Privileges], error),
    }
}

pub(super) fn not_asked(answers: &mut Answers, conditions: &[Condition], why: impl Display) {
    for condition in conditions {
        answers.not_asked(*condition, &why);
    }
}

const SETTINGS: [Condition; 5] =
    [Condition::ServerVersion, Condition::Fsync, Condition::FullPageWrites, Condition::SynchronousCommit, Condition::Isolation];

fn judge_settings(settings: &Settings, answers: &mut Answers) {
    let version = settings.version / 10_000;
    answers.judged(
        Condition::ServerVersion,
        if settings.version >= OLDEST_SERVER {
            Ok(format!("PostgreSQL {version}"))
        } else {
            Err((format!("PostgreSQL {version}"), "it must be 14 or newer"))
        },
    );
    for (condition, is_on, todo) in [
        (Condition::Fsync, settings.fsync, format!("ALTER SYSTEM SET fsync = on, {ACCEPTED}")),
        (Condition::FullPageWrites, settings.full_page_writes, format!("ALTER SYSTEM SET full_page_writes = on, {ACCEPTED}")),
    ] {
        match (is_on, settings.no_fsync_accepted) {
            (true, _) => answers.holds(condition, "on"),
            (false, true) => {
                answers.holds(condition, "off, and the database says that it need not survive a crash (onceward.no_fsync)")
            }
            (false, false) => answers.fails(condition, "off", todo),
        }
    }
    answers.judged(
        Condition::SynchronousCommit,
        match settings.synchronous_commit.as_str() {
            "off" => Err(("off in our sessions".to_owned(), "ALTER ROLE or ALTER DATABASE … SET synchronous_commit = on")),
            value => Ok(value.to_owned()),
        },
    );
    let (ours, default) = (settings.isolation.as_str(), settings.default_isolation.as_str());
    answers.judged(
        Condition::Isolation,
        match (ours, default) {
            ("read committed", "read committed") => Ok("read committed".to_owned()),
            ("read committed", default) => Err((
                format!("the default of our role is {default}"),
                "ALTER ROLE or ALTER DATABASE … SET default_transaction_isolation = 'read committed'",
            )),
            (ours, _) => {
                Err((format!("our transactions are {ours}"), "something between us and the server changes BEGIN: take it away"))
            }
        },
    );
}

async fn memory(config: &Config, s: &mut Session, made: Option<Made>, answers: &mut Answers) {
    let both = [Condition::Floor, Condition::Days];
    let memory = match conditions::memory(s).await {
        Ok(memory) => memory,
        Err(error) => return not_asked(answers, &both, error),
    };
    let Some(floor) = memory.floor else {
        if memory.in_use {
            answers.fails(
                Condition::Floor,
                "the row of `retention` is gone, and events were settled here",
                "restore it: the first id of the oldest day that was never dropped, never a lower one",
            );
        } else {
            answers.does_not_apply(Condition::Floor, "nothing was settled yet: the first `run` writes it");
        }
        return answers.does_not_apply(Condition::Days, "the first `run` makes them");
    };
    let today = memory.now_ms.div_euclid(DAY_MS);
    if unix_ms(floor) > memory.now_ms {
        let found = format_args!("{} lies in the future: every new event would be held", day_text(floor)).to_string();
        answers.fails(Condition::Floor, found, "find out who has written it, and correct the row of `retention`");
    } else {
        answers.holds(Condition::Floor, day_text(floor));
    }
    if matches!(made, Some(Made::Plain | Made::Otherwise)) {
        return answers.does_not_apply(Condition::Days, "processed_event is not kept by the day of the id");
    }
    match retention::days(s).await {
        Ok(days) => judge_days(&days, today, config.retention.days_ahead, &memory, answers),
        Err(error) => not_asked(answers, &[Condition::Days], error),
    }
}

async fn plain_table(s: &mut Session, answers: &mut Answers) {
    match old_claims::plain_table(s).await {
        Ok(PlainTable { indexed: true, .. }) => answers.holds(Condition::OldClaims, "an index begins with processed_at"),
        Ok(PlainTable { indexed: false, .. }) => {
            answers.fails(Condition::OldClaims, "no index of processed_event begins with processed_at", CREATE_INDEX)
        }
        Err(error) => not_asked(answers, &[Condition::OldClaims], error),
    }
}

/// Today, and as many after it as are configured.
fn judge_days(days: &[(uuid::Uuid, uuid::Uuid)], today: i64, ahead: u32, memory: &Memory, answers: &mut Answers) {
    let missing: Vec<i64> = (today..=today + i64::from(ahead))
        .filter(|day| {
            let (from, to) = (first_id_of_day(*day), first_id_of_day(day + 1));
            memory.floor.is_none_or(|floor| from >= floor) && !days.iter().any(|(first, end)| *first <= from && to <= *end)
        })
        .collect();
    let Some(first) = missing.first() else {
        let behind = days.iter().filter(|(first, _)| day_of(*first) < today).count();
        return answers.holds(Condition::Days, format_args!("today, {ahead} ahead, {behind} behind"));
    };
    answers.fails(
        Condition::Days,
        format_args!(
            "{} of today and the next {ahead} days are missing, the first is {}",
            missing.len(),
            day_text(first_id_of_day(*first))
        ),
        "`run` makes them when it starts and every two seconds: if one runs, `/ready` says why it cannot",
    );
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;
    use crate::config::Secret;

    #[test]
    fn a_database_elsewhere_wants_to_be_encrypted_and_known() {
        let verdict = |host: &str, words: &str| {
            let (mut config, mut answers) = (Config::default(), Answers::default());
            config.database.url = Secret::new(format!("postgres://u@{host}/d{words}"));
            encryption(&config, &mut answers);
            answers.0[&Condition::DatabaseTls].verdict
        };
        for host in ["127.0.0.1", "localhost", "[::1]", "%2Frun%2Fpg"] {
            assert_eq!(verdict(host, ""), Verdict::Ok, "{host}");
        }
        for (words, wanted) in [
            ("", Verdict::Failed),
            ("?sslmode=disable", Verdict::Failed),
            ("?sslmode=require", Verdict::Failed),
            ("?sslmode=require&sslrootcert=/ca.pem", Verdict::Ok),
            ("?sslmode=verify-full&sslrootcert=system", Verdict::Ok),
        ] {
            assert_eq!(verdict("db", words), wanted, "{words}");
            assert_eq!(verdict("db,localhost", words), wanted, "{words}");
        }
        assert_eq!(verdict("db", "?hostaddr=127.0.0.1"), Verdict::Ok);
    }

    fn settings() -> Settings {
        let on = || "on".to_owned();
        let read_committed = || "read committed".to_owned();
        Settings {
            version: 150_004,
            fsync: true,
            full_page_writes: true,
            synchronous_commit: on(),
            default_isolation: read_committed(),
            isolation: read_committed(),
            no_fsync_accepted: false,
        }
    }

    fn failed(settings: &Settings) -> Vec<Condition> {
        let mut answers = Answers::default();
        judge_settings(settings, &mut answers);
        assert_eq!(answers.0.len(), SETTINGS.len());
        answers.0.into_values().filter(|finding| finding.verdict == Verdict::Failed).map(|finding| finding.condition).collect()
    }

    #[test]
    fn each_setting_has_its_own_line() {
        assert_eq!(failed(&settings()), []);
        assert_eq!(failed(&Settings { version: 130_013, ..settings() }), [Condition::ServerVersion]);
        assert_eq!(failed(&Settings { fsync: false, ..settings() }), [Condition::Fsync]);
        assert_eq!(failed(&Settings { fsync: false, no_fsync_accepted: true, ..settings() }), []);
        assert_eq!(failed(&Settings { isolation: "serializable".to_owned(), ..settings() }), [Condition::Isolation]);
        assert_eq!(failed(&Settings { synchronous_commit: "local".to_owned(), ..settings() }), []);
    }
}
