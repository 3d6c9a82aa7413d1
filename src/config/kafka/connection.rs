//! How a broker is reached and who we are to it: the options that must fit together.
//!
//! librdkafka takes most of them one by one and in silence: user and password count for nothing without `security.protocol`, and the
//! mechanism that it assumes is one that is not built in.
//!
//! Invariant: an option of TLS or SASL that would count for nothing is a fault.

use std::fs;

use super::{KafkaConfig, KafkaOptions, Token};

/// What may be wrong: key and problem.
type Faults = Vec<(String, String)>;

/// What is built into our librdkafka, and needs nothing of this machine.
const MECHANISMS: [&str; 4] = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"];
/// Each with its second name.
const MECHANISM: [&str; 2] = ["sasl.mechanism", "sasl.mechanisms"];
/// Of our own certificate, and of its key.
const CERTIFICATE: [&str; 2] = ["ssl.certificate.location", "ssl.certificate.pem"];
const KEY: [&str; 2] = ["ssl.key.location", "ssl.key.pem"];

/// How records and passwords travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Anybody on the way can read and change them.
    Plain,
    /// TLS, but with whom is not looked at.
    Unverified,
    /// TLS with a broker whose name stands in a certificate that is vouched for.
    Verified,
}

impl KafkaConfig {
    /// How the brokers are spoken to.
    #[must_use]
    pub fn wire(&self) -> Wire {
        let off = |key, words: &[&str]| {
            self.options.get(key).is_some_and(|value| words.iter().any(|word| value.eq_ignore_ascii_case(word)))
        };
        if !self.is_tls() {
            Wire::Plain
        } else if off("enable.ssl.certificate.verification", &["false", "0", "f"])
            || off("ssl.endpoint.identification.algorithm", &["none"])
        {
            Wire::Unverified
        } else {
            Wire::Verified
        }
    }

    pub(super) fn is_tls(&self) -> bool {
        matches!(self.protocol().as_str(), "ssl" | "sasl_ssl")
    }

    fn protocol(&self) -> String {
        self.options.get("security.protocol").unwrap_or("plaintext").to_ascii_lowercase()
    }

    /// What does not fit together.
    pub(in crate::config) fn connection_faults(&self) -> Faults {
        let mut faults = Faults::new();
        let options = &self.options;
        let protocol = self.protocol();
        let given = |prefix: &str| options.0.keys().find(|key| key.starts_with(prefix)).cloned();
        if let Some(key) = given("sasl.").filter(|_| !protocol.starts_with("sasl_")) {
            faults.push(fault(
                "security.protocol",
                format!("is {protocol}, so that {key} counts for nothing: must be sasl_ssl (or sasl_plaintext)"),
            ));
        } else if let Some(key) = given("ssl.").filter(|_| !self.is_tls()) {
            faults.push(fault(
                "security.protocol",
                format!("is {protocol}, so that {key} counts for nothing: must be ssl or sasl_ssl"),
            ));
        }
        if protocol.starts_with("sasl_") {
            self.sasl_faults(&mut faults);
        } else if !self.oauth_token_file.is_empty() {
            faults.push(fault(
                "security.protocol",
                format!("is {protocol}, so that kafka.oauth_token_file counts for nothing: must be sasl_ssl"),
            ));
        }
        if let (Some((has, lacks)), None) = (one_without_other(options), given("ssl.keystore.")) {
            faults.push(fault(lacks, format!("is required, for {has} is given: a certificate is worth nothing without its key")));
        }
        for (key, file) in options.0.iter().filter(|(key, _)| key.starts_with("ssl.") && key.ends_with(".location")) {
            let is_a_name = key.as_str() == "ssl.ca.location" && file == "probe";
            if let Some(error) = fs::metadata(file).err().filter(|_| !is_a_name) {
                faults.push(fault(key, format!("{file} cannot be read: {error}")));
            }
        }
        faults
    }

    fn sasl_faults(&self, faults: &mut Faults) {
        let mechanism = MECHANISM.iter().find_map(|key| self.options.get(key)).unwrap_or_default();
        if !MECHANISMS.contains(&mechanism) {
            return faults.push(fault("sasl.mechanism", format!("must be one of {}", MECHANISMS.join(", "))));
        }
        if mechanism == "OAUTHBEARER" {
            if self.oauth_token_file.is_empty() {
                faults.push(("kafka.oauth_token_file".to_owned(), "is required with OAUTHBEARER".to_owned()));
            } else if let Err(problem) = Token::read(&self.oauth_token_file) {
                faults.push(("kafka.oauth_token_file".to_owned(), problem));
            }
            return;
        }
        if !self.oauth_token_file.is_empty() {
            faults.push(fault("sasl.mechanism", format!("is {mechanism}, so that kafka.oauth_token_file counts for nothing")));
        }
        for key in ["sasl.username", "sasl.password"].into_iter().filter(|key| self.options.get(key).is_none()) {
            let from_file = if key == "sasl.password" { "; `sasl.password.file` names a file that holds it" } else { "" };
            faults.push(fault(key, format!("is required with {mechanism}{from_file}")));
        }
    }
}

/// Certificate and key: which is there, and which is not.
fn one_without_other(options: &KafkaOptions) -> Option<(&'static str, &'static str)> {
    let of = |names: [&'static str; 2]| names.into_iter().find(|name| options.get(name).is_some());
    match (of(CERTIFICATE), of(KEY)) {
        (Some(certificate), None) => Some((certificate, KEY[0])),
        (None, Some(key)) => Some((key, CERTIFICATE[0])),
        _ => None,
    }
}

fn fault(option: &str, problem: String) -> (String, String) {
    (format!("kafka.options.{option}"), problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kafka(options: &[(&str, &str)]) -> KafkaConfig {
        let mut kafka = KafkaConfig::default();
        for (key, value) in options {
            kafka.options.insert(key, value).expect(key);
        }
        kafka
    }

    fn faults(options: &[(&str, &str)]) -> Vec<String> {
        kafka(options).connection_faults().into_iter().map(|(key, problem)| format!("{key} {problem}")).collect()
    }

    const SCRAM: [(&str, &str); 4] = [
        ("security.protocol", "SASL_SSL"),
        ("sasl.mechanism", "SCRAM-SHA-512"),
        ("sasl.username", "billing"),
        ("sasl.password", "hunter2"),
    ];

    #[test]
    fn what_fits_together_has_no_fault() {
        for options in [
            &[][..],
            &[("security.protocol", "ssl")],
            &SCRAM,
            &[("security.protocol", "ssl"), ("ssl.ca.location", "probe"), ("ssl.certificate.pem", "a"), ("ssl.key.pem", "b")],
        ] {
            assert_eq!(faults(options), [""; 0], "{options:?}");
        }
    }

    #[test]
    fn an_option_that_would_count_for_nothing_is_a_fault() {
        for (options, key, says) in [
            (&SCRAM[1..], "kafka.options.security.protocol", "is plaintext, so that sasl.mechanism counts for nothing"),
            (&[("ssl.ca.location", "/etc")][..], "kafka.options.security.protocol", "so that ssl.ca.location counts for nothing"),
            (&SCRAM[..1], "kafka.options.sasl.mechanism", "must be one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER"),
            (&SCRAM[..2], "kafka.options.sasl.username", "is required with SCRAM-SHA-512"),
            (&SCRAM[..3], "kafka.options.sasl.password", "`sasl.password.file` names a file"),
            (
                &[("security.protocol", "sasl_ssl"), ("sasl.mechanism", "OAUTHBEARER")][..],
                "kafka.oauth_token_file",
                "is required with OAUTHBEARER",
            ),
            (
                &[("security.protocol", "ssl"), ("ssl.certificate.pem", "a")][..],
                "kafka.options.ssl.key.location",
                "is required, for ssl.certificate.pem is given",
            ),
            (
                &[("security.protocol", "ssl"), ("ssl.ca.location", "/nowhere")][..],
                "kafka.options.ssl.ca.location",
                "/nowhere cannot be read",
            ),
        ] {
            let faults = faults(options);
            assert!(faults.iter().any(|fault| fault.starts_with(key) && fault.contains(says)), "{options:?}: {faults:?}");
        }
    }

    #[test]
    fn a_token_file_that_is_not_used_or_not_there_is_a_fault() {
        let mut without = kafka(&[]);
        let mut scram = kafka(&SCRAM);
        let mut oauth = kafka(&[("security.protocol", "sasl_ssl"), ("sasl.mechanism", "OAUTHBEARER")]);
        for (kafka, key) in [
            (&mut without, "kafka.options.security.protocol"),
            (&mut scram, "kafka.options.sasl.mechanism"),
            (&mut oauth, "kafka.oauth_token_file"),
        ] {
            "/nowhere/token".clone_into(&mut kafka.oauth_token_file);
            let faults = kafka.connection_faults();
            assert_eq!(faults.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), [key], "{faults:?}");
        }
    }

    #[test]
    fn whoever_turns_the_verification_off_is_told_from_whoever_does_not() {
        let tls = ("security.protocol", "ssl");
        assert_eq!(kafka(&[]).wire(), Wire::Plain);
        assert_eq!(kafka(&[tls]).wire(), Wire::Verified);
        assert_eq!(kafka(&[tls, ("ssl.endpoint.identification.algorithm", "https")]).wire(), Wire::Verified);
        assert_eq!(kafka(&[tls, ("ssl.endpoint.identification.algorithm", "none")]).wire(), Wire::Unverified);
        assert_eq!(kafka(&[tls, ("enable.ssl.certificate.verification", "false")]).wire(), Wire::Unverified);
    }
}
