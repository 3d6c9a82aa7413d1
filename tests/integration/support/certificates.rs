//! Authorities and what they sign, made anew for each test.

use std::fs;
use std::path::PathBuf;

use onceward::lab::process::TempFolder;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, PKCS_ECDSA_P256_SHA256, SignatureAlgorithm,
};
use uuid::Uuid;

/// Signs certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, both in PEM.
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

/// Files of a test's own, which it may replace.
pub struct Folder(TempFolder);

impl Authority {
    pub fn new() -> Self {
        Self::signing_with(&PKCS_ECDSA_P256_SHA256)
    }

    /// What it signs is signed in this way.
    pub fn signing_with(algorithm: &'static SignatureAlgorithm) -> Self {
        let mut params = params("nobody");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, format!("authority {}", Uuid::now_v7()));
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate_for(algorithm).expect("a key")).expect("an authority"))
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// For a server of this name, or for a client that is called so.
    pub fn sign(&self, name: &str) -> Identity {
        let key = KeyPair::generate().expect("a key");
        let certificate = params(name).signed_by(&key, &self.0).expect("a certificate");
        Identity { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

impl Folder {
    pub fn new() -> Self {
        Self(TempFolder::new("certificates").expect("a folder"))
    }

    /// Writes a file, also over an older one, and gives its name. At once: who reads it meanwhile gets the one or the other.
    pub fn put(&self, name: &str, content: &str) -> String {
        let (path, new) = (self.path(name), self.path(&format!("{name}.new")));
        fs::write(&new, content).and_then(|()| fs::rename(&new, &path)).expect("the file is written");
        path.display().to_string()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}
