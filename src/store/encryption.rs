//! From a socket to one that is encrypted, if it is wanted and the server can.
//!
//! In: a TCP connection of which nothing was read or written. Out: what the protocol runs over, and what its server is known by. It owns
//! nothing afterwards.
//!
//! Invariant: plain text is spoken only where [`Encryption`] allows it and the server has said that it has no TLS; once it has said that
//! it has, nothing but TLS is spoken.

use std::io;
use std::sync::Arc;

use ring::digest::{Algorithm, SHA256, SHA384, SHA512, digest};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::tap::Socket;
use super::url::Encryption;

/// A length of eight, and a version of the protocol that stands for the question.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

/// What the protocol runs over.
pub(super) struct Line {
    pub socket: Box<dyn Socket>,
    /// The hash of the server's certificate, with which a password is bound to this very connection (`tls-server-end-point`).
    pub end_point: Option<Vec<u8>>,
}

impl Line {
    pub(super) fn plain(socket: impl Socket + 'static) -> Self {
        Self { socket: Box::new(socket), end_point: None }
    }

    /// # Errors
    /// The server has no TLS and must, or is not whom we trust.
    pub(super) async fn open(mut socket: TcpStream, host: &str, encryption: &Encryption<Arc<ClientConfig>>) -> io::Result<Self> {
        let (config, must) = match encryption {
            Encryption::Never => return Ok(Self::plain(socket)),
            Encryption::IfOffered(config) => (config, false),
            Encryption::Always(config) => (config, true),
        };
        socket.write_all(&SSL_REQUEST).await?;
        // Not a byte more: what somebody else has sent in plain text is then met by the handshake, and ends it.
        match (socket.read_u8().await?, must) {
            (b'S', _) => {}
            (b'N', false) => return Ok(Self::plain(socket)),
            (b'N', true) => return Err(io::Error::other("the server has no TLS, and database.url (sslmode) wants it")),
            _ => return Err(io::Error::other("this is no PostgreSQL server, or it is about to end")),
        }
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let tls = TlsConnector::from(Arc::clone(config)).connect(name, socket).await?;
        let certificate = tls.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let end_point = certificate.and_then(|certificate| end_point(certificate));
        Ok(Self { socket: Box::new(tls), end_point })
    }
}

/// RFC 5929: the hash of the certificate, by the algorithm of its signature, or SHA-256 where that is weaker. `None` where there is none.
fn end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1];
    const ECDSA: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3];
    // Certificate: to be signed, algorithm of the signature, signature. The algorithm: its identifier, parameters.
    let (whole, _) = element(certificate)?;
    let (_, behind) = element(whole)?;
    let (identifier, _) = element(element(behind)?.0)?;
    let (kind, family) = identifier.split_last()?;
    let hash: &'static Algorithm = match (family, kind) {
        (RSA, 4 | 5 | 11) | (ECDSA, 2) => &SHA256,
        (RSA, 12) | (ECDSA, 3) => &SHA384,
        (RSA, 13) | (ECDSA, 4) => &SHA512,
        _ => return None,
    };
    Some(digest(hash, certificate).as_ref().to_vec())
}

/// The content of the first element of this DER, and what stands behind it.
fn element(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let [_kind, length, rest @ ..] = der else { return None };
    if *length < 0x80 {
        return rest.split_at_checked(usize::from(*length));
    }
    let (bytes, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
    let length = bytes.iter().try_fold(0_usize, |length, byte| length.checked_mul(256)?.checked_add(usize::from(*byte)))?;
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519};

    use super::*;

    #[test]
    fn a_certificate_is_known_by_the_hash_of_its_signature() {
        for (algorithm, bytes) in [(&PKCS_ECDSA_P256_SHA256, Some(32)), (&PKCS_ECDSA_P384_SHA384, Some(48)), (&PKCS_ED25519, None)]
        {
            let key = KeyPair::generate_for(algorithm).expect("a key");
            let names = vec!["a-name-that-makes-the-certificate-longer-than-127-bytes.example".to_owned()];
            let certificate = CertificateParams::new(names).and_then(|params| params.self_signed(&key)).expect("a certificate");
            assert_eq!(end_point(certificate.der()).map(|hash| hash.len()), bytes);
        }
    }

    #[test]
    fn what_is_no_certificate_has_no_hash_and_costs_nothing() {
        for der in
            [&[][..], &[0x30], &[0x30, 0x84, 0xff, 0xff, 0xff, 0xff], &[0x30, 0xff], &[0x30, 3, 0x30, 0x81, 0xff], &[0x30; 64]]
        {
            assert_eq!(end_point(der), None, "{der:?}");
        }
    }
}
