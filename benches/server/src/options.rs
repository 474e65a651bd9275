//! The command line.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// When the streams of one round get their events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pacing {
    /// All of them at the tick.
    Burst,
    /// Evenly spread over the tick.
    Spread,
}

impl FromStr for Pacing {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "burst" => Ok(Self::Burst),
            "spread" => Ok(Self::Spread),
            _ => Err(format!("--pacing must be burst or spread, not {name}")),
        }
    }
}

/// All options; see `USAGE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub streams: usize,
    pub per_event: usize,
    pub tick: Duration,
    pub hold: Duration,
    pub pacing: Pacing,
    pub cumulative: bool,
    pub tls: Option<(PathBuf, PathBuf)>,
    pub cpu: Option<usize>,
}

/// Printed with each error of the command line.
pub const USAGE: &str = "\
usage: bench-server [options]
  --streams N          a round starts when N requests are waiting (1)
  --per-event N        tokens per event (1)
  --tick SECONDS       from one event of a stream to the next (0)
  --hold SECONDS       before the first tick of a round, and before a one-event response (0)
  --pacing burst|spread  all streams of a round at the tick, or evenly spread over it (burst)
  --cumulative         each SGLang event repeats the whole response
  --tls CERT KEY       serve TLS; PEM files
  --cpu N              run on this CPU only";

impl Options {
    /// Read the arguments, without the program's name.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            streams: 1,
            per_event: 1,
            tick: Duration::ZERO,
            hold: Duration::ZERO,
            pacing: Pacing::Burst,
            cumulative: false,
            tls: None,
            cpu: None,
        };
        while let Some(name) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{name} needs a value"));
            match name.as_str() {
                "--streams" => options.streams = positive(&name, &value()?)?,
                "--per-event" => options.per_event = positive(&name, &value()?)?,
                "--tick" => options.tick = seconds(&name, &value()?)?,
                "--hold" => options.hold = seconds(&name, &value()?)?,
                "--pacing" => options.pacing = value()?.parse()?,
                "--cumulative" => options.cumulative = true,
                "--tls" => options.tls = Some((value()?.into(), value()?.into())),
                "--cpu" => options.cpu = Some(number(&name, &value()?)?),
                _ => return Err(format!("unknown option {name}")),
            }
        }
        Ok(options)
    }
}

fn number(name: &str, value: &str) -> Result<usize, String> {
    value.parse().map_err(|_| format!("{name} must be a whole number, not {value}"))
}

fn positive(name: &str, value: &str) -> Result<usize, String> {
    match number(name, value)? {
        0 => Err(format!("{name} must be at least 1, not 0")),
        found => Ok(found),
    }
}

fn seconds(name: &str, value: &str) -> Result<Duration, String> {
    let found = value.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    found.ok_or_else(|| format!("{name} must be a number of seconds, 0 or more, not {value}"))
}
