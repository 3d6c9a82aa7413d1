//! Loses one answer, as a network does.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Stands between one client and the server and loses the answer to COMMIT, after or before the server heard of it.
pub async fn lossy_proxy(server: (String, u16), deliver: bool) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let server = TcpStream::connect(server).await.unwrap();
        lose_commit(client, server, deliver).await;
    });
    port
}

async fn lose_commit(client: TcpStream, server: TcpStream, deliver: bool) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let lost = AtomicBool::new(false);
    let back = async {
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = from_server.read(&mut bytes).await {
            if lost.load(Ordering::Acquire) {
                return;
            }
            to_client.write_all(&bytes[..read]).await.unwrap();
        }
    };
    let forth = async {
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = from_client.read(&mut bytes).await {
            let commit = bytes[..read].windows(7).any(|window| window == b"COMMIT\0");
            lost.fetch_or(commit, Ordering::Release);
            if commit && !deliver {
                return;
            }
            to_server.write_all(&bytes[..read]).await.unwrap();
        }
    };
    // Whichever ends first closes both sockets.
    tokio::select! { () = back => {}, () = forth => {} }
}
