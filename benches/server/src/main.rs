//! The engine of the benchmarks: prepared SGLang and vLLM streams, paced, from one thread.
//!
//! It prints its port, and ends when its standard input does. `--help` lists the options.

mod connection;
mod http;
mod options;
mod reply;
mod rounds;
mod server;
mod stats;
mod tokens;

use std::error::Error;
use std::io::{self, Read};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::options::{Options, USAGE};
use crate::server::Server;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            eprintln!("{message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match serve(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-server: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(options: Options) -> Result<(), Box<dyn Error>> {
    if let Some(cpu) = options.cpu {
        pin(cpu)?;
    }
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    let tls = options.tls.as_ref().map(|(cert, key)| tls_config(cert, key)).transpose()?;
    let server = Server::new(options, tls)?;
    println!("{}", server.address()?.port());
    thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0); // the process that started it has ended
    });
    Ok(server.run()?)
}

#[cfg(target_os = "linux")]
fn pin(cpu: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg(not(target_os = "linux"))]
fn pin(_: usize) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "--cpu needs Linux"))
}

fn tls_config(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, Box<dyn Error>> {
    let chain = CertificateDer::pem_file_iter(cert)?.collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_file(key)?;
    let mut config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
