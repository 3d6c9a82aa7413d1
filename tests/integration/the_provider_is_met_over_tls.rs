//! A provider of one's own has an issuer of one's own, and wants to know who calls.

use onceward::config::Config;
use onceward::lab::provider_stub::ProviderStub;
use onceward::provider::{Answer, Client};
use uuid::Uuid;

use crate::support::{Authority, Folder, TlsFront, block_on, stub};

fn charge(config: &Config) -> Answer {
    let client = Client::new(&config.provider.settings().expect("an address")).expect("a client");
    block_on(client.charge(Uuid::now_v7(), br#"{"orderId":7,"amount":10.00,"currency":"EUR"}"#.to_vec(), false, None))
}

fn calling(url: &str) -> Config {
    let mut config = Config::default();
    config.provider.url = Some(url.parse().expect("a URL"));
    config
}

fn bookings(stub: &ProviderStub) -> usize {
    stub.ledger().len()
}

#[test]
fn its_own_issuer_counts_when_it_is_named_and_no_other() {
    let (authority, folder, provider) = (Authority::new(), Folder::new(), stub());
    let front = TlsFront::before(&provider.url(), &authority.sign("localhost"), None);
    let mut config = calling(&front.url());
    // The machine's own issuers, if there are any: a configuration without them is refused at the start.
    if Client::new(&config.provider.settings().expect("an address")).is_ok() {
        assert_eq!(charge(&config).class(), "not_reached");
    }
    config.provider.ca_file = Some(folder.put("stranger.pem", &Authority::new().pem()).into());
    assert_eq!(charge(&config).class(), "not_reached");
    config.provider.ca_file = Some(folder.put("ca.pem", &authority.pem()).into());
    assert_eq!(charge(&config).class(), "charged");
    config.provider.url = Some(front.url().replace("localhost", "127.0.0.1").parse().expect("a URL"));
    assert_eq!(charge(&config).class(), "not_reached", "the certificate is of another name");
    assert_eq!(bookings(&provider), 1);
}

#[test]
fn who_calls_is_known_by_a_certificate() {
    let (authority, folder, provider) = (Authority::new(), Folder::new(), stub());
    let front = TlsFront::before(&provider.url(), &authority.sign("localhost"), Some(&authority));
    let mut config = calling(&front.url());
    config.provider.ca_file = Some(folder.put("ca.pem", &authority.pem()).into());
    assert_ne!(charge(&config).class(), "charged", "without a certificate");
    let mut shows = |authority: &Authority| {
        let identity = authority.sign("onceward");
        config.provider.client_cert_file = Some(folder.put("client.pem", &identity.certificate).into());
        config.provider.client_key_file = Some(folder.put("client.key", &identity.key).into());
        charge(&config)
    };
    assert_ne!(shows(&Authority::new()).class(), "charged", "of an issuer that the provider does not know");
    assert_eq!(bookings(&provider), 0);
    assert_eq!(shows(&authority).class(), "charged");
}
