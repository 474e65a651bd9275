//! When each stream gets its next event.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::{Duration, Instant};

use crate::options::Pacing;

/// Names a connection; never used twice.
pub type Key = usize;

/// Streams that started together.
struct Round {
    streams: Vec<Key>,
    start: Instant,
    events: usize,
    event: usize,
    stream: usize,
}

/// All rounds that are under way.
pub struct Rounds {
    tick: Duration,
    pacing: Pacing,
    agenda: BinaryHeap<Reverse<(Instant, usize)>>,
    by_id: HashMap<usize, Round>,
    started: usize,
}

/// One event whose time has come.
#[derive(Debug, PartialEq, Eq)]
pub struct Due {
    pub key: Key,
    /// Its place in the stream, from 0.
    pub event: usize,
    pub at: Instant,
}

impl Rounds {
    /// None yet.
    pub fn new(tick: Duration, pacing: Pacing) -> Self {
        Self { tick, pacing, agenda: BinaryHeap::new(), by_id: HashMap::new(), started: 0 }
    }

    /// Start a round; its first tick begins at `start`, and its first events come at the end of that tick.
    pub fn start(&mut self, streams: Vec<Key>, events: usize, start: Instant) {
        let round = Round { streams, start, events, event: 0, stream: 0 };
        self.agenda.push(Reverse((self.due_at(&round), self.started)));
        self.by_id.insert(self.started, round);
        self.started += 1;
    }

    /// When the next event is due.
    pub fn next_at(&self) -> Option<Instant> {
        self.agenda.peek().map(|Reverse((at, _))| *at)
    }

    /// Take the next event that is due by `now`.
    pub fn take(&mut self, now: Instant) -> Option<Due> {
        let &Reverse((at, id)) = self.agenda.peek()?;
        if at > now {
            return None;
        }
        self.agenda.pop();
        let round = self.by_id.get_mut(&id).expect("a round on the agenda is under way");
        let due = Due { key: round.streams[round.stream], event: round.event, at };
        round.stream += 1;
        if round.stream == round.streams.len() {
            round.stream = 0;
            round.event += 1;
        }
        if round.event == round.events {
            self.by_id.remove(&id);
        } else {
            let at = self.due_at(&self.by_id[&id]);
            self.agenda.push(Reverse((at, id)));
        }
        Some(due)
    }

    fn due_at(&self, round: &Round) -> Instant {
        let nanos = self.tick.as_nanos();
        let whole = nanos * (round.event as u128 + 1);
        let part = match self.pacing {
            Pacing::Burst => 0,
            Pacing::Spread => nanos * round.stream as u128 / round.streams.len() as u128,
        };
        round.start + Duration::from_nanos(u64::try_from(whole + part).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(pacing: Pacing) -> Vec<(Key, usize, u64)> {
        let start = Instant::now();
        let mut rounds = Rounds::new(Duration::from_millis(20), pacing);
        rounds.start(vec![7, 8], 2, start);
        let mut found = Vec::new();
        while let Some(at) = rounds.next_at() {
            assert_eq!(rounds.take(at.checked_sub(Duration::from_nanos(1)).unwrap()), None);
            let due = rounds.take(at).unwrap();
            let millis = u64::try_from((due.at - start).as_millis()).unwrap();
            found.push((due.key, due.event, millis));
        }
        found
    }

    #[test]
    fn a_burst_serves_all_streams_at_the_tick() {
        assert_eq!(times(Pacing::Burst), [(7, 0, 20), (8, 0, 20), (7, 1, 40), (8, 1, 40)]);
    }

    #[test]
    fn a_spread_round_serves_them_evenly_over_the_tick() {
        assert_eq!(times(Pacing::Spread), [(7, 0, 20), (8, 0, 30), (7, 1, 40), (8, 1, 50)]);
    }
}
