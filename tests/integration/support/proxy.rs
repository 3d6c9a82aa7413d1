//! The network between an engine and its database, which a test can break.

use std::ops::Deref;

use onceward::lab::proxy;

use super::Database;

/// A way to a test's database.
pub struct Proxy(proxy::Proxy);

impl Proxy {
    pub fn before(database: &Database) -> Self {
        Self(proxy::Proxy::before(database.url()).expect("a way to the database"))
    }
}

impl Deref for Proxy {
    type Target = proxy::Proxy;

    fn deref(&self) -> &proxy::Proxy {
        &self.0
    }
}
