//! The reactor, over real sockets.

#![cfg(target_os = "linux")]

mod connecting;
mod driven;
mod panics;
mod reading;
mod reuse;
mod sending;
