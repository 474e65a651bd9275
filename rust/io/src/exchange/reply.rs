//! The body of a reply that is no stream: `Reply`.

/// Keeps the body of a reply up to a limit.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    body: Vec<u8>,
}

impl Reply {
    /// Keep the next bytes of the body, or of them what the limit allows. Returns whether all were kept.
    pub(crate) fn keep(&mut self, part: &[u8], limit: usize) -> bool {
        let room = limit - self.body.len();
        self.body.extend_from_slice(&part[..part.len().min(room)]);
        part.len() <= room
    }

    /// Hand the body out.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.body)
    }

    /// Bytes of memory held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.body.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::Reply;

    #[test]
    fn a_body_is_kept_up_to_its_limit() {
        let mut reply = Reply::default();
        assert!(reply.keep(b"abc", 5));
        assert!(reply.keep(b"de", 5));
        assert!(!reply.keep(b"fg", 5));
        assert_eq!(reply.take(), b"abcde");
        assert_eq!(reply.take(), b"");
    }
}
