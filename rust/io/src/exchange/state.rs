//! The states of an exchange, and the table of its transitions.
//!
//! The rules:
//!
//! 1. Nothing is sent before the connection stands and the caller asks for it: `Connecting`, `Ready`, `Sending`.
//! 2. `Sending` ends when the request is wholly sent, when sending fails, or when the head of the final reply is
//!    complete. A reply that comes early therefore leads from `Sending` past `Head`.
//! 3. The head decides which reply it is: a stream (`Waiting`, `Streaming`, `Rest`) or not (`Refused`).
//! 4. A stream is `Waiting` until its first token and `Streaming` until its terminal event or an error that the engine
//!    reports. Then the `Rest` of its body is read, so that the connection can be used again.
//! 5. `Done` and `Failed` are over: they ignore everything but `Close`; a byte behind the reply takes from `Done` that
//!    the connection is reusable.
//! 6. Only an exchange whose request was aborted is `Done` without a reply, and its connection is never reusable.
//! 7. `Close` is possible always and is final: `Closed` ignores everything.

/// Where an exchange is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The connection is not established yet.
    Connecting,
    /// The connection stands, and nothing has been sent.
    Ready,
    /// The request is being sent. A reply is already read.
    Sending,
    /// The head of the reply is awaited or incomplete.
    Head,
    /// The reply is a stream that has brought no token yet.
    Waiting,
    /// The stream brings tokens.
    Streaming,
    /// The stream is past its terminal event, or past an error that the engine reported; the rest of its body is read.
    Rest,
    /// The reply is no stream, and its body is being read.
    Refused,
    /// The reply has ended, or the request was aborted.
    Done {
        /// Whether the connection can carry another request.
        reusable: bool,
    },
    /// The connection or the reply broke: the connection must be closed.
    Failed,
    /// The driver has closed the exchange: nothing is sent or read any more.
    Closed,
}

impl State {
    /// Whether nothing more is sent or read: `Done`, `Failed` or `Closed`.
    #[must_use]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Done { .. } | Self::Failed | Self::Closed)
    }
}

/// What an input amounts to once it has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Signal {
    /// The connection stands.
    Connected,
    /// The caller wants the request to be sent.
    Send,
    /// The request is wholly sent, or sending has failed.
    SendingOver,
    /// The final head is complete, and the reply is a stream.
    StreamHead,
    /// The final head is complete, and the reply is no stream.
    PlainHead,
    /// The first token.
    FirstToken,
    /// The terminal event, or an error that the engine reported.
    LastEvent,
    /// Nothing more is read, and nothing broke.
    End {
        /// Whether the connection can carry another request.
        reusable: bool,
    },
    /// The connection or the reply broke.
    Fail,
    /// Something arrived behind the reply: a byte, the end of the connection.
    Disturbed,
    /// The driver closes the exchange.
    Close,
}

impl State {
    /// The state after `signal`; None if the signal is impossible here.
    pub(crate) const fn next(self, signal: Signal) -> Option<Self> {
        use Signal as On;
        use State::{Closed, Connecting, Done, Failed, Head, Ready, Refused, Rest, Sending, Streaming, Waiting};
        Some(match (self, signal) {
            (Closed, _) => return None,
            (_, On::Close) => Closed,

            (Connecting, On::Connected) => Ready,
            (Ready, On::Send) => Sending,
            (Sending, On::SendingOver) => Head,

            (Sending | Head, On::StreamHead) => Waiting,
            (Sending | Head, On::PlainHead) => Refused,
            (Waiting, On::FirstToken) => Streaming,
            (Waiting | Streaming, On::LastEvent) => Rest,

            (Waiting | Streaming | Rest | Refused, On::End { reusable }) => Done { reusable },
            (Connecting | Ready | Sending | Head, On::End { reusable: false }) | (Done { .. }, On::Disturbed) => {
                Done { reusable: false }
            }

            (Connecting | Ready | Sending | Head | Waiting | Streaming | Rest | Refused, On::Fail) => Failed,

            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::{Signal, State};

    const STATES: [State; 12] = [
        State::Connecting,
        State::Ready,
        State::Sending,
        State::Head,
        State::Waiting,
        State::Streaming,
        State::Rest,
        State::Refused,
        State::Done { reusable: true },
        State::Done { reusable: false },
        State::Failed,
        State::Closed,
    ];
    const SIGNALS: [Signal; 12] = [
        Signal::Connected,
        Signal::Send,
        Signal::SendingOver,
        Signal::StreamHead,
        Signal::PlainHead,
        Signal::FirstToken,
        Signal::LastEvent,
        Signal::End { reusable: true },
        Signal::End { reusable: false },
        Signal::Fail,
        Signal::Disturbed,
        Signal::Close,
    ];

    /// For each state, by its name, the states that follow it.
    fn successors() -> BTreeMap<String, BTreeSet<String>> {
        let name = |state: State| format!("{state:?}");
        STATES
            .map(|state| (name(state), SIGNALS.iter().filter_map(|&signal| state.next(signal)).map(name).collect()))
            .into()
    }

    #[test]
    fn every_state_is_reached_and_no_state_is_left_twice() {
        let successors = successors();
        let mut reached = BTreeSet::from(["Connecting".to_owned()]);
        let mut waiting = vec!["Connecting".to_owned()];
        while let Some(state) = waiting.pop() {
            waiting.extend(successors[&state].iter().filter(|&next| reached.insert(next.clone())).cloned());
        }
        assert_eq!(reached, successors.keys().cloned().collect());
        // The states are listed in the order in which they are passed: none leads back, so no exchange goes in circles.
        for (place, state) in STATES.iter().enumerate() {
            for next in SIGNALS.iter().filter_map(|&signal| state.next(signal)) {
                let later = STATES.iter().position(|&other| other == next).expect("listed");
                assert!(later > place || (next == *state && state.is_over()), "{state:?} -> {next:?}");
            }
        }
    }

    #[test]
    fn closed_is_absorbing_and_everything_can_be_closed() {
        for signal in SIGNALS {
            assert_eq!(State::Closed.next(signal), None);
        }
        for state in &STATES[..STATES.len() - 1] {
            assert_eq!(state.next(Signal::Close), Some(State::Closed), "{state:?}");
        }
    }

    #[test]
    fn what_is_over_stays_over() {
        for state in STATES.into_iter().filter(|state| state.is_over()) {
            assert!(SIGNALS.iter().filter_map(|&signal| state.next(signal)).all(State::is_over), "{state:?}");
        }
    }

    #[test]
    fn a_connection_is_reusable_only_after_a_reply() {
        let reusable = State::Done { reusable: true };
        let before: Vec<_> = STATES
            .into_iter()
            .filter(|state| SIGNALS.iter().any(|&signal| state.next(signal) == Some(reusable)))
            .collect();
        assert_eq!(before, [State::Waiting, State::Streaming, State::Rest, State::Refused]);
    }

    #[test]
    fn the_request_is_sent_only_on_demand() {
        let before: Vec<_> = STATES
            .into_iter()
            .filter(|state| SIGNALS.iter().any(|&signal| state.next(signal) == Some(State::Sending)))
            .collect();
        assert_eq!(before, [State::Ready]);
    }
}
