//! A request on its way out: `Outgoing`.

use crate::exchange::failure::Failure;
use crate::exchange::request::Request;

/// How much of a request is sent. The request is freed when the sending ends.
pub(crate) struct Outgoing {
    /// Until the sending has ended.
    request: Option<Request>,
    sent: usize,
    /// What sending failed with.
    errno: Option<i32>,
}

impl Outgoing {
    pub(crate) fn new(request: Request) -> Self {
        Self { request: Some(request), sent: 0, errno: None }
    }

    /// The bytes to send next: of the head, of the body.
    pub(crate) fn unsent(&self) -> [&[u8]; 2] {
        self.request.as_ref().map_or([&[], &[]], |request| request.unsent(self.sent))
    }

    /// Count bytes that were sent. Returns whether the request is now wholly sent.
    pub(crate) fn advance(&mut self, count: usize) -> bool {
        self.sent = self.sent.saturating_add(count);
        let is_sent = self.unsent().iter().all(|part| part.is_empty());
        if is_sent {
            self.request = None;
        }
        is_sent
    }

    /// Sending failed.
    pub(crate) fn fail(&mut self, errno: i32) {
        self.request = None;
        self.errno = Some(errno);
    }

    /// End the sending. Returns whether the request had been wholly sent.
    pub(crate) fn end(&mut self) -> bool {
        self.request.take().is_none() && self.errno.is_none()
    }

    /// What it means that the server closes the connection without a reply.
    pub(crate) fn failure(&self) -> Failure {
        self.errno.map_or(Failure::Closed, Failure::Reset)
    }
}
