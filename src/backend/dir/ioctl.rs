//! IOCTL: the few requests about a file itself, as `chattr(1)` and project quotas use them.

use zerocopy::IntoBytes;

use super::{Answer, Call, Dir};
use crate::sys::FileIoctl;
use crate::wire::Errno;
use crate::wire::abi::{IoctlIn, IoctlOut};

impl Dir {
    /// Flags and project ids are set as a whole, so that setting them twice is setting them once.
    pub(super) fn ioctl(
        &self,
        call: &Call<'_>,
        arg: IoctlIn,
        input: &[u8],
    ) -> Result<Answer, Errno> {
        let request = FileIoctl::from_number(arg.cmd).ok_or(Errno::ENOTTY)?;
        let mut argument = [0; 32];
        if request.writes() {
            let given = input.get(..request.size()).ok_or(Errno::EINVAL)?;
            argument[..given.len()].copy_from_slice(given);
        }
        let file = self.file(call)?;
        request.issue(&file.fd, &mut argument)?;
        let mut reply = IoctlOut::default().as_bytes().to_vec();
        if !request.writes() {
            let size = request.size().min(arg.out_size as usize);
            reply.extend_from_slice(&argument[..size]);
        }
        Ok(Answer::Data(reply))
    }
}
