//! TLS in front of a provider that speaks plain text.

use std::sync::{Arc, Mutex, PoisonError};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoClientAuth, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy, split};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use url::Url;

use super::block_on;
use super::certificates::{Authority, Identity};

/// Listens as long as the tests run.
pub struct TlsFront {
    port: u16,
    tokens: Arc<Mutex<Vec<String>>>,
}

impl TlsFront {
    /// In front of `url`, as `identity`; with `clients`, only for those with a certificate of theirs.
    pub fn before(url: &str, identity: &Identity, clients: Option<&Authority>) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = clients.map(|authority| {
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("a certificate")).expect("a root");
            let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
            builder.build().expect("a verifier")
        });
        let chain = vec![CertificateDer::from_pem_slice(identity.certificate.as_bytes()).expect("a certificate")];
        let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).expect("a key");
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_client_cert_verifier(verifier.unwrap_or_else(|| Arc::new(NoClientAuth)))
            .with_single_cert(chain, key)
            .expect("a certificate and its key");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let url = Url::parse(url).expect("a URL");
        let address = format!("{}:{}", url.host_str().expect("a host"), url.port().expect("a port"));
        let tokens = Arc::<Mutex<Vec<String>>>::default();
        let heard = Arc::clone(&tokens);
        let port = block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let port = listener.local_addr().expect("bound").port();
            tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(carry(client, acceptor.clone(), address.clone(), Arc::clone(&heard)));
                }
            });
            port
        });
        Self { port, tokens }
    }

    pub fn url(&self) -> String {
        format!("https://localhost:{}", self.port)
    }

    /// Every bearer token that was sent, in its order.
    pub fn tokens(&self) -> Vec<String> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn carry(client: TcpStream, acceptor: TlsAcceptor, address: String, tokens: Arc<Mutex<Vec<String>>>) {
    // Whoever is refused here was refused on purpose.
    let Ok(client) = acceptor.accept(client).await else { return };
    let mut server = TcpStream::connect(address).await.expect("the provider listens");
    let (mut from_client, mut to_client) = split(client);
    let (mut from_server, mut to_server) = server.split();
    let forth = async {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from_client.read(&mut bytes).await {
            let text = String::from_utf8_lossy(&bytes[..read]);
            let token = text.lines().find_map(|line| line.strip_prefix("authorization: Bearer "));
            tokens.lock().unwrap_or_else(PoisonError::into_inner).extend(token.map(str::to_owned));
            if to_server.write_all(&bytes[..read]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! { () = forth => {}, _ = copy(&mut from_server, &mut to_client) => {} }
}
