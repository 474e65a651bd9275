//! A panic in one exchange concerns no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use streamfold_io::Event;
use streamfold_io::reactor::monotonic;

use crate::driven::{CHUNKED, Driven, body, stream, stream_of, whole_chunk, write};

/// A body of 64 MiB that can be looked at so many times.
struct Fragile(AtomicUsize, Vec<u8>);

impl AsRef<[u8]> for Fragile {
    fn as_ref(&self) -> &[u8] {
        assert!(self.0.fetch_sub(1, Ordering::Relaxed) > 0, "looked at once too often");
        &self.1
    }
}

#[test]
fn a_panic_in_one_exchange_ends_it_alone() {
    // In start, and in a sweep.
    for looks in [1, 12] {
        let mut driven = Driven::new();
        let sound = stream();
        let (other, mut server) = driven.begin(&sound);
        let (id, mut fragile_server) = driven.open();
        let fragile = stream_of(Arc::new(Fragile(AtomicUsize::new(looks), vec![b'x'; 64 << 20])));
        assert!(driven.reactor.start(id, fragile.clone(), monotonic()));
        let reader = std::thread::spawn(move || std::io::copy(&mut fragile_server, &mut std::io::sink()).is_ok());
        driven.until(|driven| driven.ended(id).is_some());
        assert!(matches!(driven.events(id)[..], [Event::Panicked, Event::Ended { reusable: false }]));
        write(&mut server, &format!("{CHUNKED}{}", whole_chunk(&body(2))));
        driven.until(|driven| driven.ended(other) == Some(true));
        assert_eq!(sound.take().token_ids, [7; 2]);
        assert!(driven.is_quiet());
        driven.reactor.end(id);
        reader.join().expect("ended");
    }
}
