//! The connections by their ids: `Slab`.

/// Names one connection for ever: the number of a place, and how often the place has been used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(u64);

impl ConnectionId {
    /// The id as a number.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// The id that was this number.
    #[must_use]
    pub const fn from_u64(id: u64) -> Self {
        Self(id)
    }

    fn new(place: usize, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | place as u64)
    }

    #[allow(clippy::cast_possible_truncation, reason = "its two halves")]
    fn parts(self) -> (usize, u32) {
        (self.0 as u32 as usize, (self.0 >> 32) as u32)
    }
}

/// Values by an id that is never given to another one, although places are used again.
pub(crate) struct Slab<T> {
    places: Vec<(u32, Option<T>)>,
    free: Vec<usize>,
}

impl<T> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn insert(&mut self, value: T) -> ConnectionId {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            self.places.len() - 1
        });
        let (generation, slot) = &mut self.places[place];
        *slot = Some(value);
        ConnectionId::new(place, *generation)
    }

    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut T> {
        let (place, generation) = id.parts();
        let (current, slot) = self.places.get_mut(place)?;
        slot.as_mut().filter(|_| *current == generation)
    }

    pub(crate) fn remove(&mut self, id: ConnectionId) -> Option<T> {
        let (place, generation) = id.parts();
        let (current, slot) = self.places.get_mut(place)?;
        if *current != generation {
            return None;
        }
        let value = slot.take()?;
        // A place whose numbers are used up is given up.
        if let Some(next) = current.checked_add(1) {
            *current = next;
            self.free.push(place);
        }
        Some(value)
    }

    /// Take all values out.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.free.clear();
        std::mem::take(&mut self.places).into_iter().filter_map(|(_, slot)| slot)
    }

    pub(crate) fn len(&self) -> usize {
        self.places.iter().filter(|(_, slot)| slot.is_some()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::{ConnectionId, Slab};

    #[test]
    fn an_id_is_never_given_to_another_value() {
        let mut slab = Slab::new();
        let first = slab.insert('a');
        assert_eq!(slab.remove(first), Some('a'));
        let second = slab.insert('b');
        assert_ne!(first, second);
        assert_eq!(slab.get_mut(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.get_mut(second), Some(&mut 'b'));
        assert_eq!(slab.places.len(), 1, "the place is used again");
        assert_eq!(slab.get_mut(ConnectionId::from_u64(u64::MAX)), None);
        assert_eq!(ConnectionId::from_u64(second.as_u64()), second);
    }

    #[test]
    fn a_place_whose_numbers_are_used_up_is_given_up() {
        let mut slab = Slab::new();
        slab.places.push((u32::MAX, None));
        slab.free.push(0);
        let last = slab.insert('a');
        assert_eq!(slab.remove(last), Some('a'));
        assert_ne!(slab.insert('b').parts().0, 0);
        assert_eq!(slab.len(), 1);
    }

    #[test]
    fn all_values_can_be_taken_out() {
        let mut slab = Slab::new();
        let ids = ['a', 'b', 'c'].map(|value| slab.insert(value));
        slab.remove(ids[1]);
        assert_eq!(slab.drain().collect::<String>(), "ac");
        assert_eq!(slab.get_mut(ids[0]), None);
    }
}
