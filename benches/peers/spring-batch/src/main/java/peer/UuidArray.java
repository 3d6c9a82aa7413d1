package peer;

import java.nio.ByteBuffer;
import java.util.List;
import java.util.UUID;
import java.util.stream.Collectors;
import org.postgresql.util.PGBinaryObject;
import org.postgresql.util.PGobject;

/**
 * A {@code uuid[]} as the server reads it fastest. The driver knows this form for arrays of numbers and texts only, and uses it for this
 * one when {@code binaryTransferEnable} names its type.
 */
final class UuidArray extends PGobject implements PGBinaryObject {

    private static final int UUID_OID = 2950;
    private static final int HEADER = 5 * Integer.BYTES;
    private static final int ELEMENT = Integer.BYTES + 2 * Long.BYTES;

    private final transient List<UUID> ids;

    UuidArray(List<UUID> ids) {
        this.ids = ids;
        type = "_uuid";
    }

    @Override
    public int lengthInBytes() {
        return HEADER + ids.size() * ELEMENT;
    }

    @Override
    public void toBytes(byte[] target, int offset) {
        ByteBuffer bytes = ByteBuffer.wrap(target, offset, lengthInBytes());
        // One dimension, no nulls, the elements' type, their number, the first one's index.
        bytes.putInt(1).putInt(0).putInt(UUID_OID).putInt(ids.size()).putInt(1);
        for (UUID id : ids) {
            bytes.putInt(2 * Long.BYTES).putLong(id.getMostSignificantBits()).putLong(id.getLeastSignificantBits());
        }
    }

    @Override
    public String getValue() {
        return ids.stream().map(UUID::toString).collect(Collectors.joining(",", "{", "}"));
    }

    @Override
    public void setByteValue(byte[] value, int offset) {
        throw new UnsupportedOperationException("only ever sent");
    }
}
