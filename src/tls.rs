//! Whom a connection of ours trusts, and what it shows of itself: for PostgreSQL and for the provider alike.
//!
//! In: names of PEM files. Out: a configuration of rustls (1.2 and 1.3, ring), or what is wrong with which file. It owns nothing.
//!
//! Invariant: only [`Trust::Anyone`] takes a certificate that no root stands for, and only [`Trust::Name`] makes sure who answers; that
//! the other side holds its certificate's key is checked always.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, ConfigBuilder, DigitallySignedStruct, Error, RootCertStore, SignatureScheme, WantsVerifier};
use url::Url;

use crate::rotating::Files;

/// What is wanted of TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// Who may answer.
    pub trust: Trust,
    /// What we show: the certificate with its chain, and its key.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// Who may answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Whoever does: nobody can listen, but nobody knows who answers.
    Anyone,
    /// Whoever has a certificate of these roots, whatever name is in it.
    Issuer(Roots),
    /// Whoever has one for the name that we asked for.
    Name(Roots),
}

/// Whose certificates count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// Those that the machine trusts.
    System,
    /// Those in this file, and no others.
    File(PathBuf),
}

impl Default for Trust {
    fn default() -> Self {
        Self::Name(Roots::System)
    }
}

/// What cannot be used, and why.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub struct Fault {
    /// Which of the files.
    pub part: Part,
    /// In words, with the file's name.
    pub problem: String,
}

/// One of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The roots.
    Roots,
    /// Our certificate.
    Certificate,
    /// Its key.
    Key,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// One of them cannot be used.
    pub fn config(&self, files: &mut Files) -> Result<ClientConfig, Fault> {
        let known = match &self.trust {
            Trust::Anyone => None,
            Trust::Issuer(roots) => Some(Known { roots: roots.read(files)?, by_name: false }),
            Trust::Name(roots) => Some(Known { roots: roots.read(files)?, by_name: true }),
        };
        let verifier = Verifier { algorithms: ring::default_provider().signature_verification_algorithms, known };
        let builder = builder().dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        let Some((certificate, key)) = &self.client else { return Ok(builder.with_no_client_auth()) };
        let chain = certificates(Part::Certificate, certificate, files)?;
        let fault = |problem: String| Fault { part: Part::Key, problem: format!("{} {problem}", key.display()) };
        let pem = files.read(key).map_err(|problem| Fault { part: Part::Key, problem })?;
        let private =
            PrivateKeyDer::from_pem_slice(pem).map_err(|_| fault("holds no private key in PEM without a passphrase".to_owned()))?;
        builder.with_client_auth_cert(chain, private).map_err(|error| match error {
            Error::InconsistentKeys(_) => fault(format!("is not the key of {}", certificate.display())),
            error => fault(format!("cannot be used: {error}")),
        })
    }
}

impl Tls {
    /// For a client of `url`. Where `http` is spoken nobody is trusted, and no file is read: a machine without any must still be able to run.
    ///
    /// # Errors
    /// One of the files cannot be used.
    pub fn of_http(&self, client: reqwest::ClientBuilder, url: &Url, files: &mut Files) -> Result<reqwest::ClientBuilder, Fault> {
        Ok(client.tls_backend_preconfigured(self.config_of_http(url, files)?))
    }

    /// The same, for a client of another kind.
    ///
    /// # Errors
    /// One of the files cannot be used.
    pub fn config_of_http(&self, url: &Url, files: &mut Files) -> Result<ClientConfig, Fault> {
        if url.scheme() == "https" {
            return self.config(files);
        }
        Ok(builder().with_root_certificates(RootCertStore::empty()).with_no_client_auth())
    }
}

fn builder() -> ConfigBuilder<ClientConfig, WantsVerifier> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider())).with_safe_default_protocol_versions();
    builder.expect("ring knows both versions")
}

impl Roots {
    fn read(&self, files: &mut Files) -> Result<RootCertStore, Fault> {
        let mut roots = RootCertStore::empty();
        let fault = |problem: String| Fault { part: Part::Roots, problem };
        match self {
            Self::System => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if roots.is_empty() {
                    return Err(fault("this machine has no root certificates: install ca-certificates, or name a file".to_owned()));
                }
            }
            Self::File(path) => {
                for certificate in certificates(Part::Roots, path, files)? {
                    let refused = |error| fault(format!("{} holds a certificate that cannot be a root: {error}", path.display()));
                    roots.add(certificate).map_err(refused)?;
                }
            }
        }
        Ok(roots)
    }
}

fn certificates(part: Part, path: &Path, files: &mut Files) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let pem = files.read(path).map_err(|problem| Fault { part, problem })?;
    match CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>() {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(Fault { part, problem: format!("{} holds no certificate in PEM, or half of one", path.display()) }),
    }
}

#[derive(Debug)]
struct Verifier {
    algorithms: WebPkiSupportedAlgorithms,
    /// `None`: whoever answers.
    known: Option<Known>,
}

#[derive(Debug)]
struct Known {
    roots: RootCertStore,
    by_name: bool,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(Known { roots, by_name }) = &self.known {
            let certificate = ParsedCertificate::try_from(certificate)?;
            let algorithms = self.algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&certificate, roots, chain, now, algorithms)?;
            if *by_name {
                verify_server_name(&certificate, name)?;
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
