//! How connections come about, and how they do not.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::unix::net::UnixListener;

use rustix::io::Errno;
use streamfold_io::reactor::{Pace, Reactor, monotonic};

use crate::driven::{Driven, PLAIN, reply};

#[test]
fn a_refused_connection_is_reported_with_its_errno_and_gone() {
    let mut driven = Driven::new();
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
    let id = driven.reactor.connect(IpAddr::V4(Ipv4Addr::LOCALHOST), port, 0).expect("a socket");
    driven.until(|driven| driven.opened(id).is_some());
    assert_eq!(driven.opened(id), Some(Errno::CONNREFUSED.raw_os_error()));
    assert!(driven.reactor.is_empty());
    assert!(driven.is_quiet());
}

#[test]
fn ipv6_and_unix_sockets_are_connected_as_well() {
    let mut driven = Driven::new();
    let path = std::env::temp_dir().join(format!("streamfold-{}.sock", std::process::id()));
    let unix = UnixListener::bind(&path).expect("a path");
    let id = driven.reactor.connect_unix(path.as_os_str().as_encoded_bytes()).expect("a socket");
    driven.until(|driven| driven.opened(id) == Some(0));
    assert!(driven.reactor.start(id, reply(), monotonic()));
    let (mut server, _) = unix.accept().expect("a connection");
    assert!(server.read(&mut [0; 4096]).expect("a request") > 0);
    std::io::Write::write_all(&mut server, PLAIN.as_bytes()).expect("possible");
    driven.until(|driven| driven.ended(id) == Some(true));
    std::fs::remove_file(&path).expect("there");
    let nobody = driven.reactor.connect_unix(path.as_os_str().as_encoded_bytes()).expect_err("nobody listens");
    assert_eq!(nobody.kind(), std::io::ErrorKind::NotFound);

    if let Ok(listener) = TcpListener::bind("[::1]:0") {
        let address = listener.local_addr().expect("bound");
        let id = driven.reactor.connect(address.ip(), address.port(), 0).expect("a socket");
        driven.until(|driven| driven.opened(id) == Some(0));
    }
}

#[test]
fn a_unix_socket_with_a_full_backlog_can_be_tried_again() {
    let path = std::env::temp_dir().join(format!("streamfold-full-{}.sock", std::process::id()));
    let listener = UnixListener::bind(&path).expect("a path");
    rustix::net::listen(&listener, 0).expect("possible");
    let mut reactor = Reactor::new(Pace::default()).expect("descriptors");
    let full = (0..16).find_map(|_| reactor.connect_unix(path.as_os_str().as_encoded_bytes()).err());
    std::fs::remove_file(&path).expect("there");
    assert_eq!(full.expect("full").kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn closing_ends_every_connection_for_its_server() {
    let mut driven = Driven::new();
    let exchange = reply();
    let (_, mut idle) = driven.open();
    let (_, mut busy) = driven.begin(&exchange);
    driven.connect();
    driven.reactor.close();
    driven.reactor.close();
    assert!(driven.reactor.is_empty());
    assert_eq!((idle.read(&mut [0]).expect("an end"), busy.read(&mut [0]).expect("an end")), (0, 0));
    assert_eq!(exchange.state(), streamfold_io::State::Closed);
}
