//! A broker that lets in only whom it knows, and to nothing that an ACL does not name.
//!
//! In: certificates as PEM, and users. Out: lines of its properties. The plain listener stays, and whoever comes by it may do everything:
//! it is the administrator's, and the controller's.
//!
//! Invariant: by the other two nobody comes in without TLS and a name.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

/// How it is made.
#[derive(Clone, Debug)]
pub struct Secured {
    /// The broker's certificate and its key.
    pub identity: String,
    /// Who vouches for the certificates of clients; such a client's name is its certificate's common name.
    pub authority: String,
    /// Name and password of those who come by SCRAM or PLAIN. Whoever has a token that is not signed is whoever it says.
    pub users: Vec<(String, String)>,
}

/// The ports of the two listeners.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doors {
    /// TLS, and a name by SASL.
    pub sasl: u16,
    /// TLS with a certificate on both sides.
    pub mutual: u16,
}

const SCRAM: [&str; 2] = ["SCRAM-SHA-256", "SCRAM-SHA-512"];
const LOGIN: &str = "org.apache.kafka.common.security";

impl Secured {
    /// What `format` must be told.
    pub(super) fn credentials(&self) -> Vec<String> {
        let of = |mechanism: &str, (name, password): &(String, String)| {
            ["--add-scram".to_owned(), format!("{mechanism}=[name={name},password={password}]")]
        };
        SCRAM.iter().flat_map(|mechanism| self.users.iter().flat_map(move |user| of(mechanism, user))).collect()
    }

    /// Lines that count instead of those before them.
    pub(super) fn settings(&self, doors: Doors, plain: u16, controller: u16, folder: &Path) -> io::Result<String> {
        let (identity, authority) = (folder.join("identity.pem"), folder.join("authority.pem"));
        fs::write(&identity, &self.identity)?;
        fs::write(&authority, &self.authority)?;
        let Doors { sasl, mutual } = doors;
        let mut text = format!(
            "listeners=PLAINTEXT://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller},SASL://127.0.0.1:{sasl},MUTUAL://127.0.0.1:{mutual}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL:SASL_SSL,MUTUAL:SSL
inter.broker.listener.name=PLAINTEXT
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
auto.create.topics.enable=false
ssl.keystore.type=PEM
ssl.keystore.location={identity}
ssl.truststore.type=PEM
ssl.truststore.location={authority}
ssl.principal.mapping.rules=RULE:^CN=([^,]+).*$/$1/
listener.name.mutual.ssl.client.auth=required
listener.name.sasl.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER
listener.name.sasl.oauthbearer.sasl.jaas.config={LOGIN}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub=\"broker\";
listener.name.sasl.oauthbearer.connections.max.reauth.ms=3600000
",
            identity = identity.display(),
            authority = authority.display(),
        );
        for mechanism in SCRAM.map(str::to_lowercase) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "listener.name.sasl.{mechanism}.sasl.jaas.config={LOGIN}.scram.ScramLoginModule required;");
        }
        let users = self.users.iter().fold(String::new(), |text, (name, password)| format!("{text} user_{name}=\"{password}\""));
        let _ = writeln!(text, "listener.name.sasl.plain.sasl.jaas.config={LOGIN}.plain.PlainLoginModule required{users};");
        Ok(text)
    }
}
